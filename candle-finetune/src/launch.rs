//! Who the ranks of a run are: threads of this process, or processes that a launcher started.

use candle_core::Device;
use candle_cp::{LaunchEnvironment, launch_environment_from};

use candle_cp_layers::CONFIG_FILE;

use crate::config::Config;
use crate::device::ComputeDevice;
use crate::error::{Error, Result};
use crate::job;
use crate::ranks::Ranks;

/// Where other launchers than torchrun say how many processes they have started.
const OTHER_LAUNCHERS: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"];

/// What was said about this process by whoever started it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launch {
    place: Option<LaunchEnvironment>,
}

/// What makes a rank.
#[derive(Debug, PartialEq, Eq)]
enum Choice<'a> {
    Threads,
    /// Over NCCL, on this device.
    Nccl(&'a LaunchEnvironment, ComputeDevice),
}

impl Launch {
    /// A process that was started by itself: its ranks are threads.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Reads the variables that `torchrun` and many cluster scripts set, see [`candle_cp::launch_environment`].
    ///
    /// # Errors
    /// Only some of them are set, or they make no sense; or another launcher says that this is one of several processes,
    /// which would all be rank 0.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let place = launch_environment_from(&lookup).map_err(Error::Launch)?;
        if place.is_some() {
            return Ok(Self { place });
        }
        for name in OTHER_LAUNCHERS {
            let count = lookup(name).and_then(|text| text.trim().parse::<usize>().ok());
            if let Some(count) = count.filter(|&count| count > 1) {
                let allowed = "1 without RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: the processes of \
                               mpirun and the like cannot be told apart yet, and each would train alone";
                return Err(Error::flag(
                    name,
                    count,
                    allowed,
                    "set these variables, as torchrun does, or start one process",
                ));
            }
        }
        Ok(Self { place })
    }

    /// Whether this process is the one that writes files and talks to people: rank 0.
    pub fn is_first(&self) -> bool {
        self.place.as_ref().is_none_or(|place| place.rank == 0)
    }

    /// Whether a launcher started this process as one of several.
    pub fn is_one_of_several(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.size > 1)
    }

    /// Rank threads that this process will have.
    pub fn threads(&self, config: &Config) -> usize {
        match self.choose(config) {
            Ok(Choice::Nccl(..)) => 1,
            _ => config.ranks(),
        }
    }

    /// The ranks of a run. A process of several opens its GPU and returns when all have come.
    ///
    /// # Errors
    /// `--cp`, `--device`, the launcher and what this program was built with do not go together; the GPU or NCCL cannot be
    /// used; the other processes do not come.
    pub fn ranks(&self, config: &Config) -> Result<Ranks> {
        let choice = self.choose(config)?;
        // Before a GPU is opened, where the model is at hand.
        if config.model_folder().is_none_or(|folder| folder.join(CONFIG_FILE).is_file()) {
            job::check_device(config, job::model(config)?.as_ref())?;
        }
        match choice {
            Choice::Threads => Ok(Ranks::Threads(config.ranks())),
            Choice::Nccl(place, device) => over_nccl(place, device.open()?),
        }
    }

    /// Other ways for processes to talk belong here.
    fn choose(&self, config: &Config) -> Result<Choice<'_>> {
        let (cp, device) = (config.cp, config.device);
        match (&self.place, device) {
            (None, ComputeDevice::Cuda(_)) if cp > 1 => {
                let allowed =
                    format!("1 in one process beside --device {device}: on several GPUs each rank is a process");
                Err(Error::flag("--cp", cp, allowed, format!("use --cp 1, or {}", how_to_start(cp))))
            }
            (None, _) => Ok(Choice::Threads),
            (Some(place), ComputeDevice::Cpu) if place.size > 1 => {
                let allowed = format!(
                    "cuda where WORLD_SIZE is {}: processes talk over NCCL, from GPU to GPU; MPI is not supported yet",
                    place.size
                );
                Err(Error::flag("--device", device, allowed, "start one process: its ranks are threads"))
            }
            (Some(_), ComputeDevice::Cpu) => Ok(Choice::Threads),
            (Some(place), ComputeDevice::Cuda(_)) if place.size != cp => {
                let size = place.size;
                let allowed = format!(
                    "{size}, the WORLD_SIZE: each process is a rank; replicas of the model (data parallelism) are not \
                     supported yet"
                );
                Err(Error::flag("--cp", cp, allowed, format!("use --cp {size}, or start {cp} processes")))
            }
            (Some(place), ComputeDevice::Cuda(number)) => self.on_gpu(place, number),
        }
    }

    fn on_gpu<'a>(&self, place: &'a LaunchEnvironment, number: Option<usize>) -> Result<Choice<'a>> {
        if place.size == 1 {
            return Ok(Choice::Threads);
        }
        if !cfg!(feature = "nccl") {
            let allowed = "1: this program was built without the feature `nccl`";
            let fix = "cargo build --release --features nccl --example NAME, which needs NVIDIA's CUDA toolkit";
            return Err(Error::flag("--cp", place.size, allowed, fix));
        }
        match number {
            None => Ok(Choice::Nccl(place, ComputeDevice::Cuda(Some(place.local_rank)))),
            Some(_) => {
                let allowed = "cuda where several processes were started: each takes the GPU of its LOCAL_RANK";
                let fix = "use --device cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs";
                Err(Error::flag("--device", ComputeDevice::Cuda(number), allowed, fix))
            }
        }
    }
}

fn how_to_start(cp: usize) -> String {
    let build = if cfg!(feature = "nccl") { "" } else { "build with --features nccl and " };
    format!(
        "{build}start torchrun --no-python --nproc-per-node {cp} PROGRAM --device cuda \
         --cp {cp}"
    )
}

#[cfg(feature = "nccl")]
fn over_nccl(place: &LaunchEnvironment, device: Device) -> Result<Ranks> {
    use candle_cp::comm::nccl;
    let options = nccl::Options { deadline: Config::DEADLINE, ..Default::default() };
    let comm = nccl::connect(&device, place, &options)?;
    Ok(Ranks::Process { comm, device })
}

#[cfg(not(feature = "nccl"))]
fn over_nccl(_: &LaunchEnvironment, _: Device) -> Result<Ranks> {
    unreachable!("chosen only with the feature")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(rank: usize, size: usize, more: &[(&str, &str)]) -> Result<Launch> {
        let (rank, size) = (rank.to_string(), size.to_string());
        let torchrun = [
            ("RANK", &*rank),
            ("WORLD_SIZE", &size),
            ("LOCAL_RANK", &rank),
            ("MASTER_ADDR", "node-0"),
            ("MASTER_PORT", "29500"),
        ];
        let all = [&torchrun[..], more].concat();
        Launch::from_vars(|name| all.iter().rfind(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    fn config(device: &str, cp: usize) -> Config {
        Config { device: device.parse().unwrap(), cp, ..Config::default() }
    }

    fn refused(launch: &Launch, config: &Config) -> String {
        let error = launch.ranks(config).unwrap_err();
        assert!(error.is_usage(), "{error}");
        error.to_string()
    }

    #[test]
    fn a_process_by_itself_has_threads() {
        let alone = Launch::from_vars(|_| None).unwrap();
        assert_eq!(alone, Launch::alone());
        assert!(alone.is_first());
        for (device, cp) in [("cpu", 1), ("cpu", 4), ("cuda", 1), ("cuda:3", 1)] {
            assert_eq!(alone.choose(&config(device, cp)).unwrap(), Choice::Threads);
            assert_eq!(alone.threads(&config(device, cp)), cp);
        }
        assert!(matches!(alone.ranks(&config("cpu", 4)).unwrap(), Ranks::Threads(4)));
        let text = refused(&alone, &config("cuda:1", 4));
        assert!(text.starts_with("--cp \"4\": allowed is 1 in one process beside --device cuda:1"), "{text}");
        let line = "torchrun --no-python --nproc-per-node 4 PROGRAM --device cuda --cp 4";
        assert!(text.ends_with(line), "{text}");
        assert_eq!(text.contains("build with --features nccl"), !cfg!(feature = "nccl"), "{text}");
    }

    #[test]
    fn a_launcher_makes_each_process_a_rank() {
        let second = launch(2, 4, &[]).unwrap();
        assert!(!second.is_first() && launch(0, 4, &[]).unwrap().is_first());
        let chosen = second.choose(&config("cuda", 4));
        if cfg!(feature = "nccl") {
            let place = second.place.as_ref().unwrap();
            assert_eq!(chosen.unwrap(), Choice::Nccl(place, ComputeDevice::Cuda(Some(2))));
            assert_eq!(second.threads(&config("cuda", 4)), 1);
            let text = refused(&second, &config("cuda:0", 4));
            assert!(text.starts_with("--device \"cuda:0\": allowed is cuda where several processes"), "{text}");
        } else {
            let text = refused(&second, &config("cuda", 4));
            assert!(
                text.contains("feature `nccl`") && text.contains("cargo build --release --features nccl"),
                "{text}"
            );
        }
        for cp in [1, 2, 5] {
            let text = refused(&second, &config("cuda", cp));
            assert!(text.starts_with(&format!("--cp \"{cp}\": allowed is 4, the WORLD_SIZE")), "{text}");
            assert!(text.ends_with(&format!("use --cp 4, or start {cp} processes")), "{text}");
        }
        for cp in [1, 4] {
            let text = refused(&second, &config("cpu", cp));
            assert!(text.starts_with("--device \"cpu\": allowed is cuda where WORLD_SIZE is 4"), "{text}");
            assert!(text.contains("MPI is not supported yet"), "{text}");
        }
    }

    #[test]
    fn a_launcher_of_one_process_changes_nothing() {
        let one = launch(0, 1, &[]).unwrap();
        assert!(one.is_first());
        for (device, cp) in [("cpu", 1), ("cpu", 4), ("cuda", 1), ("cuda:3", 1)] {
            assert_eq!(one.choose(&config(device, cp)).unwrap(), Choice::Threads);
        }
        assert!(refused(&one, &config("cuda", 2)).starts_with("--cp \"2\": allowed is 1, the WORLD_SIZE"));
    }

    #[test]
    fn half_an_environment_and_other_launchers_are_refused() {
        let error = launch(1, 4, &[("MASTER_PORT", "")]).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("MASTER_PORT is missing or empty"), "{error}");
        for name in OTHER_LAUNCHERS {
            let started = |count: &str| Launch::from_vars(|asked| (asked == name).then(|| count.to_string()));
            let error = started("4").unwrap_err();
            assert!(
                error.is_usage() && error.to_string().starts_with(&format!("{name} \"4\": allowed is 1")),
                "{error}"
            );
            assert_eq!(started("1").unwrap(), Launch::alone());
            assert_eq!(started("4(x2)").unwrap(), Launch::alone());
            // Beneath such a launcher torchrun, or a script like it, says who is who.
            assert!(!launch(1, 4, &[(name, "4")]).unwrap().is_first());
        }
    }
}
