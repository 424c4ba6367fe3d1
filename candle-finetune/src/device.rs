//! Where a model runs.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;

use crate::error::{Error, Result};

/// The device of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ComputeDevice {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number. Without one: that of the process's place on its machine if there is one process per
    /// GPU, else the first.
    Cuda(Option<usize>),
}

impl ComputeDevice {
    /// Opens it, a GPU with a stream of its own. Tensors of two openings of one GPU do not mix: open it once and clone
    /// what comes.
    ///
    /// # Errors
    /// The program was built without the feature `cuda`, or there is no such GPU.
    pub fn open(self) -> Result<Device> {
        self.check_build()?;
        match self {
            Self::Cpu => Ok(Device::Cpu),
            // Not `new_cuda`: its stream is another one in every thread.
            Self::Cuda(number) => Device::new_cuda_with_stream(number.unwrap_or(0))
                .map_err(|cause| Error::DeviceUnavailable { device: self.to_string(), cause: Box::new(cause) }),
        }
    }

    /// Whether the program was built for it.
    pub(crate) fn check_build(self) -> Result<()> {
        match self {
            Self::Cuda(_) if !cfg!(feature = "cuda") => {
                let allowed = "cpu: this program was built without the feature `cuda`";
                let fix = "build it with --features cuda, which needs NVIDIA's CUDA toolkit, or leave --device out";
                Err(Error::flag("--device", self, allowed, fix))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

impl FromStr for ComputeDevice {
    /// What is allowed.
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?;
        let found = match text.trim() {
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(None)),
            other => other.strip_prefix("cuda:").and_then(number).map(|number| Self::Cuda(Some(number))),
        };
        found.ok_or_else(|| "cpu, cuda, or cuda:N with the number of a GPU, from 0".to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for (text, device) in [
            ("cpu", ComputeDevice::Cpu),
            ("cuda", ComputeDevice::Cuda(None)),
            (" cuda:3 ", ComputeDevice::Cuda(Some(3))),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "CUDA", "cuda:99999999999999999999"] {
            assert!(wrong.parse::<ComputeDevice>().unwrap_err().contains("cuda:N"), "{wrong}");
        }
    }

    #[test]
    fn the_cpu_is_always_there() {
        assert!(ComputeDevice::Cpu.open().unwrap().is_cpu());
    }

    /// Where there is a GPU, it opens.
    #[test]
    fn what_is_not_there_is_an_error_that_names_it() {
        let error = match ComputeDevice::Cuda(Some(63)).open() {
            Ok(_) => return,
            Err(error) => error,
        };
        let text = error.to_string();
        assert!(text.contains("--device \"cuda:63\""), "{text}");
        let named = if cfg!(feature = "cuda") { "nvidia-smi" } else { "--features cuda" };
        assert!(error.is_usage() && text.contains(named), "{text}");
    }
}
