//! Who the ranks of a run are: threads of this process, or processes that a launcher started.

use std::time::Duration;

use candle_core::Device;
use candle_cp::{LaunchEnvironment, launch_environment_from};

use candle_cp_layers::CONFIG_FILE;

use crate::config::Config;
use crate::device::ComputeDevice;
use crate::error::{Error, Result};
use crate::job;
use crate::ranks::Ranks;
use crate::transport::Transport;

#[cfg(test)]
mod tests;

/// Most ranks that one process may have as threads.
const MOST_THREADS: usize = 64;

/// What was said about this process by whoever started it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launch {
    place: Option<LaunchEnvironment>,
}

/// What makes a rank.
#[derive(Debug, PartialEq, Eq)]
enum Choice<'a> {
    Threads,
    /// Over MPI; without a launcher a group of one.
    Mpi(Option<&'a LaunchEnvironment>),
    /// Over NCCL, on this device.
    Nccl(&'a LaunchEnvironment, ComputeDevice),
}

impl Launch {
    /// A process that was started by itself: its ranks are threads.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Reads the variables of torchrun, `mpirun`, `mpiexec` and `srun`, see [`candle_cp::launch`].
    ///
    /// # Errors
    /// Only some of them are set, or they make no sense.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        Ok(Self { place: launch_environment_from(lookup).map_err(Error::Launch)? })
    }

    /// What the launcher said.
    pub fn place(&self) -> Option<&LaunchEnvironment> {
        self.place.as_ref()
    }

    /// Whether this process is the one that writes files and talks to people: rank 0.
    pub fn is_first(&self) -> bool {
        self.place.as_ref().is_none_or(|place| place.rank == 0)
    }

    /// Whether a launcher started this process as one of several.
    pub fn is_one_of_several(&self) -> bool {
        self.size().is_some_and(|size| size > 1)
    }

    /// Processes that a launcher has started, if one has.
    pub fn size(&self) -> Option<usize> {
        self.place.as_ref().map(|place| place.size)
    }

    /// Sets up this process for its ranks, as [`candle_cp::prepare_process`] and [`candle_cp::prepare_rank_process`] do.
    ///
    /// # Safety
    /// No other thread may run yet: environment variables are not synchronised.
    pub unsafe fn prepare_process(&self, config: &Config) {
        let place = match self.choose(config) {
            Ok(Choice::Mpi(place)) => place,
            Ok(Choice::Nccl(place, _)) => Some(place),
            _ => None,
        };
        // SAFETY: the caller promises that there is no other thread.
        unsafe {
            match place {
                Some(place) => candle_cp::prepare_rank_process(place),
                None => candle_cp::prepare_process(config.ranks()),
            }
        }
    }

    /// The ranks of a run. A process of several returns when all have come, after it has opened its GPU if it has one.
    ///
    /// # Errors
    /// `--cp`, `--comm`, `--device`, the launcher and what this program was built with do not go together; the GPU, NCCL or
    /// MPI cannot be used; the other processes do not come.
    pub fn ranks(&self, config: &Config) -> Result<Ranks> {
        let choice = self.choose(config)?;
        // Before a GPU is opened, where the model is at hand.
        if config.model_folder().is_none_or(|folder| folder.join(CONFIG_FILE).is_file()) {
            job::check_device(config, job::model(config)?.as_ref())?;
        }
        match choice {
            Choice::Threads => Ok(Ranks::Threads(config.ranks())),
            Choice::Mpi(place) => over_mpi(place, config.deadline),
            Choice::Nccl(place, device) => over_nccl(place, device.open()?, config.deadline),
        }
    }

    /// The one place that decides over what ranks talk.
    fn choose(&self, config: &Config) -> Result<Choice<'_>> {
        let several = self.place.as_ref().filter(|place| place.size > 1);
        match (config.comm, several, config.device) {
            (Transport::Threads, ..) | (Transport::Auto, None, _) => threads(config),
            (Transport::Mpi, _, ComputeDevice::Cuda(_)) => {
                let allowed = "nccl beside --device cuda: processes with a GPU each talk from GPU to GPU";
                Err(Error::flag("--comm", config.comm, allowed, "leave --comm or --device out"))
            }
            (Transport::Nccl, _, ComputeDevice::Cpu) => {
                let allowed = "mpi or threads beside --device cpu: NCCL connects GPUs";
                Err(Error::flag("--comm", config.comm, allowed, "leave --comm out, or add --device cuda"))
            }
            (Transport::Nccl, None, _) => {
                let allowed = "auto or threads in one process: NCCL connects several, with one GPU each";
                Err(Error::flag("--comm", config.comm, allowed, format!("leave --comm out, or {}", start_nccl(config))))
            }
            (Transport::Mpi, None, ComputeDevice::Cpu) => alone_on_mpi(config).map(|()| Choice::Mpi(self.place())),
            (Transport::Auto | Transport::Mpi, Some(place), ComputeDevice::Cpu) => {
                check_mpi_build(config, Some(place))?;
                check_replicas(config, place)?;
                Ok(Choice::Mpi(Some(place)))
            }
            (Transport::Auto | Transport::Nccl, Some(place), ComputeDevice::Cuda(number)) => {
                on_gpu(config, place, number)
            }
        }
    }
}

fn threads(config: &Config) -> Result<Choice<'static>> {
    let (cp, dp, device) = (config.cp, config.replicas(), config.device);
    let (flag, given) = if cp > 1 { ("--cp", cp) } else { ("--dp", dp) };
    if config.ranks() > 1 && device != ComputeDevice::Cpu {
        let allowed = format!("1 in one process beside --device {device}: on several GPUs each rank is a process");
        return Err(Error::flag(flag, given, allowed, format!("use {flag} 1, or {}", start_nccl(config))));
    }
    if config.ranks() > MOST_THREADS {
        let allowed = format!("what makes at most {MOST_THREADS} ranks in one process, where each is a thread");
        return Err(Error::flag(flag, given, allowed, "use fewer, or start a process for each rank with mpirun"));
    }
    Ok(Choice::Threads)
}

fn alone_on_mpi(config: &Config) -> Result<()> {
    check_mpi_build(config, None)?;
    match config.cp {
        1 => Ok(()),
        cp => {
            let allowed = "1 in one process beside --comm mpi: each rank is a process";
            Err(Error::flag("--cp", cp, allowed, format!("start {}, or leave --comm out", mpirun(config, cp))))
        }
    }
}

fn check_mpi_build(config: &Config, place: Option<&LaunchEnvironment>) -> Result<()> {
    if cfg!(feature = "mpi") {
        return Ok(());
    }
    let fix = format!(
        "build it with cargo build --release --features mpi --example {}, which needs OpenMPI or MPICH with their headers, \
         and start {}; with --comm threads this process trains by itself",
        program(config),
        mpirun(config, place.map_or(config.cp, |place| place.size)),
    );
    let why = "this program was built without the feature `mpi`";
    Err(match place {
        Some(place) => {
            let allowed = format!("1 on CPUs: {why}, over which processes talk there");
            Error::flag(place.launcher.size_variable(), place.size, allowed, fix)
        }
        None => Error::flag("--comm", config.comm, format!("threads: {why}"), fix),
    })
}

/// Every `cp` processes share their sequences, and there is a replica of the model for each of these groups.
fn check_replicas(config: &Config, place: &LaunchEnvironment) -> Result<()> {
    let (size, cp) = (place.size, config.cp);
    if size.is_multiple_of(cp) {
        return Ok(());
    }
    let divisors: Vec<usize> = (1..=size).filter(|&divisor| size.is_multiple_of(divisor)).collect();
    let nearest = divisors.iter().rfind(|&&divisor| divisor <= cp).copied().unwrap_or(1);
    let divisors: Vec<String> = divisors.iter().map(usize::to_string).collect();
    let allowed = format!(
        "{}: it has to divide the {size} processes that {} says there are",
        divisors.join(", "),
        place.launcher.size_variable()
    );
    let more = size.next_multiple_of(cp);
    Err(Error::flag("--cp", cp, allowed, format!("use --cp {nearest}, or start {more} processes")))
}

fn on_gpu<'a>(config: &Config, place: &'a LaunchEnvironment, number: Option<usize>) -> Result<Choice<'a>> {
    if !cfg!(feature = "nccl") {
        let allowed = "1 with GPUs: this program was built without the feature `nccl`, over which processes talk there";
        let fix = format!(
            "build it with cargo build --release --features nccl --example {}, which needs NVIDIA's CUDA toolkit; with \
             --comm threads this process trains by itself",
            program(config)
        );
        return Err(Error::flag(place.launcher.size_variable(), place.size, allowed, fix));
    }
    check_replicas(config, place)?;
    if number.is_some() {
        let allowed = "cuda where several processes were started: each takes the GPU of its number on its machine";
        let fix = "use --device cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs";
        return Err(Error::flag("--device", config.device, allowed, fix));
    }
    let Some(local_rank) = place.local_rank else {
        let allowed = format!("one whose launcher numbers the processes of each machine; {} does not", place.launcher);
        let fix = "start the processes with torchrun, mpirun of OpenMPI or srun";
        return Err(Error::flag("--device", config.device, allowed, fix));
    };
    place.meeting().map_err(Error::Launch)?;
    Ok(Choice::Nccl(place, ComputeDevice::Cuda(Some(local_rank))))
}

fn program(config: &Config) -> String {
    format!("finetune_{}", config.family)
}

/// The line that starts `size` processes on CPUs.
fn mpirun(config: &Config, size: usize) -> String {
    let cp = if size.is_multiple_of(config.cp) { config.cp } else { size };
    format!("mpirun -n {size} --bind-to none target/release/examples/{} --cp {cp}", program(config))
}

fn start_nccl(config: &Config) -> String {
    let (cp, ranks, program) = (config.cp, config.ranks(), program(config));
    let build = match cfg!(feature = "nccl") {
        true => String::new(),
        false => format!("build with cargo build --release --features nccl --example {program} and "),
    };
    format!(
        "{build}start torchrun --no-python --nproc-per-node {ranks} target/release/examples/{program} --device cuda --cp {cp}"
    )
}

#[cfg(feature = "nccl")]
fn over_nccl(place: &LaunchEnvironment, device: Device, deadline: Duration) -> Result<Ranks> {
    use candle_cp::comm::nccl;
    let options = nccl::Options { deadline, ..Default::default() };
    let comm = nccl::connect(&device, place, &options)?;
    Ok(Ranks::Process { comm, device })
}

#[cfg(not(feature = "nccl"))]
fn over_nccl(_: &LaunchEnvironment, _: Device, _: Duration) -> Result<Ranks> {
    unreachable!("chosen only with the feature")
}

#[cfg(feature = "mpi")]
fn over_mpi(place: Option<&LaunchEnvironment>, deadline: Duration) -> Result<Ranks> {
    use candle_cp::comm::mpi;
    let options = mpi::Options { deadline, ..Default::default() };
    let comm = mpi::connect(&options)?;
    check_world(place, comm.rank(), comm.size())?;
    Ok(Ranks::Process { comm, device: Device::Cpu })
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_: Option<&LaunchEnvironment>, _: Duration) -> Result<Ranks> {
    unreachable!("chosen only with the feature")
}

/// Whether MPI says of this process what its launcher said. Started by another MPI than the one it is linked with, each
/// process is a world of its own.
#[cfg(any(test, feature = "mpi"))]
fn check_world(place: Option<&LaunchEnvironment>, rank: usize, size: usize) -> Result<()> {
    let told = place.map_or((0, 1), |place| (place.rank, place.size));
    if told == (rank, size) {
        return Ok(());
    }
    Err(Error::WorldsDiffer { launcher: place.map(|place| place.launcher), told, found: (rank, size) })
}
