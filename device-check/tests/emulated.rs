//! The check itself, with the emulator in place of a device.

use candle_cp_kernels::gpu::{GpuLimits, Kernels, Launch};
use device_check::{Error, Result, Sizes, Target, check};
use ptx_emulator::{CopyLanding, Memory, Module};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

struct Emulated {
    memory: Memory,
    modules: BTreeMap<&'static str, Module>,
    launches: usize,
    /// Changes a launch before it runs.
    fault: fn(&Launch) -> Launch,
}

impl Emulated {
    fn new(fault: fn(&Launch) -> Launch) -> Self {
        Self { memory: Memory::new(), modules: BTreeMap::new(), launches: 0, fault }
    }
}

impl Target for Emulated {
    fn limits(&self) -> GpuLimits {
        GpuLimits { capability: (9, 0), shared_bytes: 227 << 10 }
    }

    fn upload(&mut self, bytes: &[u8]) -> Result<u64> {
        Ok(self.memory.upload(bytes))
    }

    fn zeros(&mut self, count: usize) -> Result<u64> {
        Ok(self.memory.upload(&vec![0; count]))
    }

    fn download(&mut self, address: u64, count: usize) -> Result<Vec<u8>> {
        self.memory.read(address, count).map_err(|e| Error::Target(e.to_string()))
    }

    fn launch(&mut self, kernels: &Kernels, launch: &Launch) -> Result<()> {
        let (name, text) = (kernels.module().name, kernels.module().text);
        let module = self.modules.entry(name).or_insert_with(|| Module::parse(text).expect("known instructions"));
        let launch = (self.fault)(launch);
        self.launches += 1;
        let run = ptx_emulator::Launch {
            kernel: &launch.kernel.name,
            grid: launch.grid,
            block: [launch.kernel.threads, 1, 1],
            shared_bytes: launch.kernel.shared_bytes,
            params: &launch.parameter_bytes(),
            copies: CopyLanding::AtWait,
        };
        run.run(module, &mut self.memory).map(drop).map_err(|fault| Error::Target(fault.to_string()))
    }

    fn clear(&mut self) -> Result<()> {
        self.memory = Memory::new();
        Ok(())
    }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/attention")
}

const SMALL: Sizes = Sizes([70, 50, 40, 24]);

#[test]
fn the_kernels_pass() {
    let mut target = Emulated::new(Launch::clone);
    let report = check(&mut target, &fixtures(), 36, SMALL).unwrap();
    let failures: Vec<_> = report.failures().collect();
    assert!(failures.is_empty(), "{failures:#?}");
    // 15 recorded results: the reference itself, and three types.
    assert_eq!(report.cases.len(), 4 * 15 + 36);
    assert!(target.launches > 500, "{} launches", target.launches);
    // Errors are not 0, and part of what is allowed is used: the rule measures something.
    let used = |part: usize| report.cases.iter().map(|case| case.used[part]).fold(0.0, f64::max);
    (0..5).for_each(|part| assert!(used(part) > 1e-3, "part {part} uses {}", used(part)));
}

/// What fails in a check of one recorded result, in three types.
fn found(name: &str, fault: fn(&Launch) -> Launch) -> Vec<String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(fixtures().join("d16_full.safetensors"), folder.join("d16_full.safetensors")).unwrap();
    std::fs::write(folder.join("index.json"), r#"{"cases": [{"file": "d16_full.safetensors", "scale": 1.0}]}"#)
        .unwrap();
    let report = check(&mut Emulated::new(fault), &folder, 0, SMALL).unwrap();
    assert_eq!(report.cases.len(), if report.stopped { 2 } else { 4 });
    report.failures().map(|case| case.failure.clone().unwrap()).collect()
}

/// Word of the launch parameter that ends with the factor on scores.
const SCALE_WORD: usize = 35;

#[test]
fn a_wrong_scale_is_found() {
    let failures = found("scale", |launch| {
        let mut launch = launch.clone();
        let scale = f32::from_bits((launch.parameter[SCALE_WORD] >> 32) as u32) * 1.01;
        launch.parameter[SCALE_WORD] = launch.parameter[SCALE_WORD] & 0xffff_ffff | u64::from(scale.to_bits()) << 32;
        launch
    });
    assert_eq!(failures.len(), 3, "{failures:?}");
    assert!(failures.iter().all(|failure| failure.contains("lse has")), "{failures:?}");
}

#[test]
fn a_block_that_is_left_out_is_found() {
    let failures = found("block", |launch| {
        let mut launch = launch.clone();
        if launch.kernel.name.starts_with("backward_keys") {
            launch.grid[1] = (launch.grid[1] - 1).max(1);
        }
        launch
    });
    assert_eq!(failures.len(), 3, "{failures:?}");
    assert!(failures.iter().all(|failure| failure.contains("dk has") && !failure.contains("out has")), "{failures:?}");
}

#[test]
fn a_kernel_that_leaves_its_memory_is_found() {
    let failures = found("memory", |launch| {
        let mut launch = launch.clone();
        if launch.kernel.name.starts_with("backward_queries") {
            // The address of the keys, the second view of four words.
            launch.parameter[4] += 1 << 20;
        }
        launch
    });
    let [failure] = &failures[..] else { panic!("nothing runs after it: {failures:?}") };
    assert!(failure.contains("kernel backward_queries_") && failure.contains("out of bounds"), "{failure}");
}
