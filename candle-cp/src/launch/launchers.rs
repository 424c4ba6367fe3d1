//! What each launcher tells.

use super::hosts::{first_host, tasks_of};
use super::variables::Variables;
use super::{LaunchEnvironment, Launcher, MeetingPlace};
use crate::error::{Error, Result};

/// Where ranks meet that were told no port: the one that torchrun takes.
const DEFAULT_PORT: u16 = 29500;

const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
const LOCAL_RANK: &str = "LOCAL_RANK";
const TASKS_OF_JOB: &str = "SLURM_NTASKS";
/// Set by a launcher that is not supported, beside none of those that are.
const UNSUPPORTED: &str = "MV2_COMM_WORLD_SIZE";

/// The first launcher whose variables are there.
pub(super) fn read(variables: &Variables) -> Result<Option<LaunchEnvironment>> {
    let seen: Vec<Launcher> = Launcher::ALL.into_iter().filter(|&launcher| is_seen(launcher, variables)).collect();
    let Some((&launcher, others)) = seen.split_first() else {
        // What is left of torchrun's is half of an environment.
        return match variables.any(&[LOCAL_RANK, ADDRESS, PORT]) {
            true => torchrun(variables).map(Some),
            false => unsupported(variables).map(|()| None),
        };
    };
    let place = match launcher {
        Launcher::Torchrun => Some(torchrun(variables)?),
        Launcher::OpenMpi => {
            let local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
            Some(mpi(launcher, local, variables)?)
        }
        Launcher::Pmi => Some(of_slurm(mpi(launcher, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), variables)?, variables)),
        Launcher::Slurm => slurm(variables)?,
    };
    Ok(place.map(|place| LaunchEnvironment { others: others.to_vec(), ..place }))
}

fn is_seen(launcher: Launcher, variables: &Variables) -> bool {
    variables.any(&[launcher.rank_variable(), launcher.size_variable()])
        || (launcher == Launcher::Slurm && variables.any(&[TASKS_OF_JOB]))
}

fn unsupported(variables: &Variables) -> Result<()> {
    match variables.number(UNSUPPORTED)? {
        Some(size) if size > 1 => {
            let allowed = "the processes of this launcher cannot be told apart, and each would be rank 0";
            let fix = "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every process as torchrun does, \
                       or use mpiexec or srun";
            Err(Error::argument(UNSUPPORTED, size, allowed, fix))
        }
        _ => Ok(()),
    }
}

fn torchrun(variables: &Variables) -> Result<LaunchEnvironment> {
    const ALL: [&str; 5] = ["RANK", "WORLD_SIZE", LOCAL_RANK, ADDRESS, PORT];
    let rank_and_size = rank_and_size(Launcher::Torchrun, Launcher::Torchrun.size_variable(), variables)?;
    let local = local(LOCAL_RANK, "LOCAL_WORLD_SIZE", rank_and_size, variables)?;
    let offset = variables.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let port = port(u16::from(offset), variables)?;
    let alone = rank_and_size.is_some_and(|(_, size)| size == 1);
    // One process by itself is told nothing of a meeting by some scripts, and needs none.
    let bare = alone && !variables.any(&[ADDRESS, PORT]);
    variables.need(
        if bare {
            &ALL[..2]
        } else if alone {
            &["RANK", "WORLD_SIZE", ADDRESS, PORT]
        } else {
            &ALL
        },
        &ALL,
    )?;
    let (rank, size) = rank_and_size.expect("both are set");
    let meeting = match (variables.get(ADDRESS), port) {
        (Some(address), Some(port)) => Some(MeetingPlace { address, port }),
        _ => None,
    };
    Ok(place(Launcher::Torchrun, (rank, size), local, meeting))
}

/// Of OpenMPI and of those with PMI.
fn mpi(
    launcher: Launcher,
    local_names: (&'static str, &'static str),
    variables: &Variables,
) -> Result<LaunchEnvironment> {
    let names = [launcher.rank_variable(), launcher.size_variable()];
    let rank_and_size = rank_and_size(launcher, names[1], variables)?;
    variables.need(&names, &[names[0], names[1], local_names.0, local_names.1])?;
    let local = local(local_names.0, local_names.1, rank_and_size, variables)?;
    let rank_and_size = rank_and_size.expect("both are set");
    Ok(place(launcher, rank_and_size, local, meeting(rank_and_size.1, local.1, None, variables)?))
}

/// `srun` may speak PMI with its processes. If both say the same, Slurm knows more about machines.
fn of_slurm(place: LaunchEnvironment, variables: &Variables) -> LaunchEnvironment {
    match slurm(variables) {
        Ok(Some(slurm)) if (slurm.rank, slurm.size) == (place.rank, place.size) => LaunchEnvironment {
            local_rank: place.local_rank.or(slurm.local_rank),
            local_size: place.local_size.or(slurm.local_size),
            machine_cpus: slurm.machine_cpus,
            meeting: place.meeting.or(slurm.meeting),
            ..place
        },
        // Slurm's own variables were not asked for.
        _ => place,
    }
}

fn slurm(variables: &Variables) -> Result<Option<LaunchEnvironment>> {
    const LOCAL: &str = "SLURM_LOCALID";
    let launcher = Launcher::Slurm;
    let [rank_name, step] = [launcher.rank_variable(), launcher.size_variable()];
    let names = [rank_name, step, TASKS_OF_JOB, LOCAL];
    if !variables.any(&[step]) {
        let one = slurm_without_step(variables)?;
        if !one {
            variables.need(&[rank_name, step], &names)?;
        }
        // A shell in an allocation of one task is nobody's process.
        return match variables.any(&[rank_name]) {
            true => Ok(Some(place(launcher, (0, 1), (None, None), meeting(1, None, None, variables)?))),
            false => Ok(None),
        };
    }
    let rank_and_size = rank_and_size(launcher, step, variables)?;
    variables.need(&[rank_name, step], &names)?;
    let node = variables.number("SLURM_NODEID")?;
    let tasks = variables.get("SLURM_STEP_TASKS_PER_NODE");
    let local_size = tasks.zip(node).and_then(|(tasks, node)| tasks_of(&tasks, node));
    let local_rank = variables.number(LOCAL)?;
    let rank_and_size = rank_and_size.expect("both are set");
    let meeting = meeting(rank_and_size.1, local_size, Some("SLURM_STEP_NODELIST"), variables)?;
    let machine_cpus = variables.number("SLURM_CPUS_ON_NODE")?;
    let place = place(launcher, rank_and_size, (local_rank, local_size), meeting);
    Ok(Some(LaunchEnvironment { machine_cpus, ..place }))
}

/// A process of a job that is none of a step: the job's script, or a shell in the allocation. Whether it is the only one.
fn slurm_without_step(variables: &Variables) -> Result<bool> {
    let [rank_name, step] = [Launcher::Slurm.rank_variable(), Launcher::Slurm.size_variable()];
    let tasks = variables.number(TASKS_OF_JOB)?.unwrap_or(1);
    if tasks > 1 {
        let found = variables.found(&[rank_name, TASKS_OF_JOB]);
        let allowed = format!(
            "without {step} this process is not one of the {tasks}: it is the job's script or shell itself, which srun \
             did not start"
        );
        let fix = format!("write srun before the program, or unset {rank_name} {TASKS_OF_JOB} for one process");
        return Err(Error::argument("the launch environment", found, allowed, fix));
    }
    Ok(variables.number(rank_name)?.unwrap_or(0) == 0)
}

fn place(
    launcher: Launcher,
    (rank, size): (usize, usize),
    (local_rank, local_size): (Option<usize>, Option<usize>),
    meeting: Option<MeetingPlace>,
) -> LaunchEnvironment {
    // One of one is the first and only one of its machine.
    let of_one = |known: Option<usize>, number: usize| if size == 1 { known.or(Some(number)) } else { known };
    let (local_rank, local_size) = (of_one(local_rank, 0), of_one(local_size, 1));
    LaunchEnvironment { launcher, rank, size, local_rank, local_size, machine_cpus: None, meeting, others: Vec::new() }
}

/// `None` if one of the two is not set.
fn rank_and_size(launcher: Launcher, size_name: &'static str, variables: &Variables) -> Result<Option<(usize, usize)>> {
    let rank_name = launcher.rank_variable();
    let (Some(rank), Some(size)) = (variables.number(rank_name)?, variables.number(size_name)?) else {
        return Ok(None);
    };
    if rank >= size {
        let allowed = format!("{size_name} is {size}, which makes the ranks 0..{size}");
        let fix = format!("count ranks from 0, and set {size_name} to their number");
        return Err(Error::argument(rank_name, rank, allowed, fix));
    }
    Ok(Some((rank, size)))
}

/// Number of the process on its machine, and of processes there, where they are told.
fn local(
    rank_name: &'static str,
    size_name: &'static str,
    of_all: Option<(usize, usize)>,
    variables: &Variables,
) -> Result<(Option<usize>, Option<usize>)> {
    let (rank, size) = (variables.number(rank_name)?, variables.number(size_name)?);
    if let (Some(local), Some(here)) = (rank, size)
        && local >= here
    {
        let allowed = format!("{size_name} is {here}, which makes the processes of this machine 0..{here}");
        let fix = format!("count them from 0, and set {size_name} to their number");
        return Err(Error::argument(rank_name, local, allowed, fix));
    }
    if let (Some(here), Some((_, all))) = (size, of_all)
        && here > all
    {
        let allowed = format!("there are {all} processes on all machines together");
        return Err(Error::argument(size_name, here, allowed, "set it to the number of processes on this machine"));
    }
    Ok((rank, size))
}

/// `MASTER_PORT` and what is added to it, if it is set.
fn port(offset: u16, variables: &Variables) -> Result<Option<u16>> {
    let Some(port) = variables.number(PORT)? else { return Ok(None) };
    let used = u16::try_from(port).ok().filter(|&port| port > 0).and_then(|port| port.checked_add(offset));
    used.map(Some).ok_or_else(|| {
        let allowed = format!("ports go from 1 to {}", u16::MAX - offset);
        Error::argument(PORT, port, allowed, "choose a free port above 1023")
    })
}

/// Where processes meet that torchrun did not start. `hosts` names the variable with the machines of all of them.
fn meeting(
    size: usize,
    local_size: Option<usize>,
    hosts: Option<&'static str>,
    variables: &Variables,
) -> Result<Option<MeetingPlace>> {
    let port = port(0, variables)?;
    if variables.any(&[ADDRESS, PORT]) {
        variables.need(&[ADDRESS, PORT], &[ADDRESS, PORT])?;
        return Ok(variables.get(ADDRESS).zip(port).map(|(address, port)| MeetingPlace { address, port }));
    }
    let at = |address: String| Some(MeetingPlace { address, port: DEFAULT_PORT });
    if size == 1 || local_size == Some(size) {
        return Ok(at("localhost".to_string()));
    }
    let Some((name, list)) = hosts.and_then(|name| Some((name, variables.get(name)?))) else { return Ok(None) };
    match first_host(&list) {
        Some(host) => Ok(at(host)),
        None => {
            let fix = format!("set {ADDRESS} and {PORT} for every process");
            Err(Error::argument(name, format!("{list:?}"), "a list of machines such as gpu[03-05,9] is expected", fix))
        }
    }
}
