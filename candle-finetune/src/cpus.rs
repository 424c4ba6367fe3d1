//! The CPUs of every rank's process: what the header says of them, and whether some lie idle or are fought over.

use std::collections::BTreeMap;

use candle_cp::Launcher;
use candle_cp::launch::{CpuSet, ProcessCpus};

use crate::error::{Error, Result};
use crate::jsonl::counted;
use crate::launch::Launch;
use crate::ranks::Ranks;

/// What a process says of itself where the system tells it nothing.
const UNKNOWN: &str = "?";

/// The CPUs of one rank's process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RankCpus {
    /// `None` where the system does not tell.
    known: Option<ProcessCpus>,
    /// Of rayon's pool.
    threads: usize,
}

impl RankCpus {
    fn of_this_process(launch: &Launch) -> Self {
        Self { known: ProcessCpus::read(launch.place()), threads: rayon::current_num_threads() }
    }

    fn to_text(&self) -> String {
        let known = self.known.as_ref();
        let text = |value: Option<String>| value.unwrap_or_else(|| UNKNOWN.to_string());
        [
            self.threads.to_string(),
            text(known.and_then(|cpus| cpus.launcher).map(|cpus| cpus.to_string())),
            text(known.map(|cpus| cpus.allowed.to_string())),
            text(known.map(|cpus| cpus.machine.clone())),
        ]
        .join("\t")
    }

    /// `None` if this is no such text.
    fn parse(text: &str) -> Option<Self> {
        let [threads, launcher, allowed, machine] = text.splitn(4, '\t').collect::<Vec<_>>().try_into().ok()?;
        let known = match (allowed, launcher) {
            (UNKNOWN, _) => None,
            (allowed, launcher) => Some(ProcessCpus {
                machine: machine.to_string(),
                allowed: allowed.parse().ok()?,
                launcher: if launcher == UNKNOWN { None } else { Some(launcher.parse().ok()?) },
            }),
        };
        Some(Self { known, threads: threads.parse().ok()? })
    }
}

/// The CPUs of all processes of a run, in rank order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cpus {
    ranks: Vec<RankCpus>,
    launcher: Option<Launcher>,
}

impl Cpus {
    /// Of a process by itself.
    pub(crate) fn of_this_process(launch: &Launch) -> Self {
        Self::new(launch, vec![RankCpus::of_this_process(launch)])
    }

    /// All processes have to call it.
    ///
    /// # Errors
    /// Another process cannot be reached, or is another version of this program.
    pub(crate) fn gather(launch: &Launch, ranks: &Ranks) -> Result<Self> {
        let mine = RankCpus::of_this_process(launch).to_text();
        let told = ranks.texts(&mine)?;
        let rank = if let Ranks::Process { comm, .. } = ranks { comm.rank() } else { 0 };
        let all = told.iter().enumerate().map(|(peer, text)| {
            RankCpus::parse(text).ok_or_else(|| Error::RanksDiffer {
                what: "the way to tell of CPUs".to_string(),
                rank,
                mine: mine.clone(),
                peer,
                theirs: text.clone(),
            })
        });
        Ok(Self::new(launch, all.collect::<Result<_>>()?))
    }

    fn new(launch: &Launch, ranks: Vec<RankCpus>) -> Self {
        Self { ranks, launcher: launch.place().map(|place| place.launcher) }
    }

    /// Threads and CPUs, such as `4 threads on 4 allowed CPUs (0-3)`.
    pub(crate) fn line(&self) -> String {
        let threads = span(self.ranks.iter().map(|rank| rank.threads), "thread");
        let known: Option<Vec<&ProcessCpus>> = self.ranks.iter().map(|rank| rank.known.as_ref()).collect();
        let on = match known.as_deref() {
            None => String::new(),
            Some([one]) => format!(" on {} ({})", counted(one.allowed.len(), "allowed CPU"), one.allowed),
            Some(all) => format!(" on {}", span(all.iter().map(|cpus| cpus.allowed.len()), "allowed CPU")),
        };
        let each = if self.ranks.len() > 1 { " for each process" } else { "" };
        format!("{threads}{on}{each}")
    }

    /// What a user should know: CPUs that no rank may use, and threads that take turns. One text for machines that are
    /// alike.
    pub(crate) fn notices(&self) -> Vec<String> {
        let mut machines: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
        for (number, rank) in self.ranks.iter().enumerate() {
            if let Some(cpus) = &rank.known {
                machines.entry(&cpus.machine).or_default().push(Rank { number, cpus, threads: rank.threads });
            }
        }
        // In rank order, whatever the names of machines.
        let mut machines: Vec<Vec<Rank>> = machines.into_values().collect();
        machines.sort_by_key(|ranks| ranks[0].number);
        let idle = machines.iter().filter_map(|ranks| self.idle(ranks)).collect();
        let crowded = machines.iter().filter_map(|ranks| crowded(ranks)).collect();
        [once(idle), once(crowded)].into_iter().flatten().collect()
    }

    /// If the launcher bound the ranks of a machine to fewer CPUs than it may use itself.
    fn idle(&self, ranks: &[Rank]) -> Option<String> {
        let used = ranks.iter().fold(CpuSet::default(), |used, rank| used.union(&rank.cpus.allowed));
        let all = ranks.iter().filter_map(|rank| rank.cpus.launcher).max()?;
        let idle = all.checked_sub(used.len()).filter(|&idle| idle > 0)?;
        let fix = match self.launcher? {
            Launcher::Torchrun => "start the processes without taskset, numactl and the like",
            Launcher::OpenMpi => "start with mpirun --bind-to none",
            Launcher::Pmi => "start with mpiexec -bind-to none (srun --cpu-bind=none)",
            Launcher::Slurm => "start with srun --cpu-bind=none, or give each task more with --cpus-per-task",
        };
        let (who, bound) = match ranks {
            [one] => (format!("rank {}", one.number), "is bound"),
            all => {
                let numbers: CpuSet = all.iter().map(|rank| rank.number).collect();
                (format!("ranks {numbers}"), "are bound")
            }
        };
        let lie = if idle == 1 { "lies" } else { "lie" };
        Some(format!("{idle} of {} {lie} idle: {who} {bound} to {used}; {fix}", counted(all, "CPU")))
    }
}

/// A rank of one machine.
struct Rank<'a> {
    number: usize,
    cpus: &'a ProcessCpus,
    threads: usize,
}

/// If the threads that may use some CPUs only are more than these.
fn crowded(ranks: &[Rank]) -> Option<String> {
    for home in ranks {
        let cpus = &home.cpus.allowed;
        let inside: Vec<&Rank> = ranks.iter().filter(|rank| rank.cpus.allowed.is_subset(cpus)).collect();
        let threads: usize = inside.iter().map(|rank| rank.threads).sum();
        if threads <= cpus.len() {
            continue;
        }
        let place = format!("{} share {} ({cpus})", counted(threads, "thread"), counted(cpus.len(), "CPU"));
        return Some(match cpus.len() / inside.len() {
            0 => format!("{place}: more processes than CPUs, which wait for each other; start fewer on a machine"),
            share => format!("{place}, and take turns; set RAYON_NUM_THREADS={share}, or leave it unset"),
        });
    }
    None
}

/// The first of the texts, and how many more there are.
fn once(texts: Vec<String>) -> Option<String> {
    let more = texts.len().saturating_sub(1);
    let first = texts.into_iter().next()?;
    Some(if more == 0 { first } else { format!("{first}; {} more have the like", counted(more, "machine")) })
}

/// `1 thread`, or `1 to 4 threads`.
fn span(numbers: impl Iterator<Item = usize> + Clone, what: &str) -> String {
    let (least, most) = (numbers.clone().min().unwrap_or(0), numbers.max().unwrap_or(0));
    match least == most {
        true => counted(most, what),
        false => format!("{least} to {}", counted(most, what)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "node-a 1234";

    /// Ranks of machines by what each may use, the launcher's CPUs and threads.
    fn made(launcher: Option<Launcher>, ranks: &[(&str, &str, Option<usize>, usize)]) -> Cpus {
        let rank = |&(machine, allowed, launcher, threads): &(&str, &str, Option<usize>, usize)| RankCpus {
            known: Some(ProcessCpus { machine: machine.to_string(), allowed: allowed.parse().unwrap(), launcher }),
            threads,
        };
        Cpus { ranks: ranks.iter().map(rank).collect(), launcher }
    }

    fn notices(launcher: Launcher, ranks: &[(&str, &str, Option<usize>, usize)]) -> Vec<String> {
        made(Some(launcher), ranks).notices()
    }

    #[test]
    fn ranks_that_use_their_machine_have_nothing_to_hear() {
        for ranks in [
            // 4 cores: shared, one each of two pairs, one process.
            &[(HOST, "0-3", Some(4), 2), (HOST, "0-3", Some(4), 2)][..],
            &[(HOST, "0-1", Some(4), 2), (HOST, "2-3", Some(4), 2)],
            &[(HOST, "0-3", Some(4), 4)],
            &[(HOST, "0-3", None, 4)],
            // 64 cores, two sockets: two ranks on each, and each machine with a rank of its own.
            &[
                (HOST, "0-31", Some(64), 16),
                (HOST, "32-63", Some(64), 16),
                (HOST, "0-31", Some(64), 16),
                (HOST, "32-63", Some(64), 16),
            ],
            &[("a", "0-63", Some(64), 64), ("b", "0-63", Some(64), 64)],
            // Three cannot share 64 evenly.
            &[(HOST, "0-63", Some(64), 21), (HOST, "0-63", Some(64), 21), (HOST, "0-63", Some(64), 21)],
        ] {
            assert_eq!(notices(Launcher::OpenMpi, ranks), Vec::<String>::new(), "{ranks:?}");
        }
    }

    #[test]
    fn idle_cpus_are_told_with_the_flag_that_frees_them() {
        let two = [(HOST, "1", Some(4), 1), (HOST, "0", Some(4), 1)];
        assert_eq!(
            notices(Launcher::OpenMpi, &two),
            ["2 of 4 CPUs lie idle: ranks 0-1 are bound to 0-1; start with mpirun --bind-to none"]
        );
        assert!(
            notices(Launcher::Slurm, &two)[0]
                .ends_with("start with srun --cpu-bind=none, or give each task more with --cpus-per-task")
        );
        assert!(notices(Launcher::Pmi, &two)[0].contains("mpiexec -bind-to none"));
        assert!(notices(Launcher::Torchrun, &two)[0].contains("without taskset"));
        let one = [(HOST, "7", Some(64), 1)];
        assert!(notices(Launcher::OpenMpi, &one)[0].starts_with("63 of 64 CPUs lie idle: rank 0 is bound to 7;"));
        // One of two sockets.
        let socket = [(HOST, "0-31", Some(64), 32)];
        assert!(notices(Launcher::OpenMpi, &socket)[0].starts_with("32 of 64 CPUs lie idle: rank 0 is bound to 0-31;"));
        let last = [(HOST, "0-1", Some(4), 2), (HOST, "2", Some(4), 1)];
        assert!(notices(Launcher::OpenMpi, &last)[0].starts_with("1 of 4 CPUs lies idle: ranks 0-1 are bound to 0-2;"));
        // Nobody bound a process that nobody started.
        assert!(made(None, &two).notices().is_empty());
    }

    #[test]
    fn machines_that_are_alike_are_told_once() {
        let ranks: Vec<_> =
            ["c", "a", "b"].iter().flat_map(|m| [(*m, "0", Some(4), 1), (*m, "1", Some(4), 1)]).collect();
        assert_eq!(
            notices(Launcher::OpenMpi, &ranks),
            [
                "2 of 4 CPUs lie idle: ranks 0-1 are bound to 0-1; start with mpirun --bind-to none; 2 machines more have the \
              like"
            ]
        );
        // The second machine alone.
        let ranks = [("a", "0-3", Some(4), 4), ("b", "2", Some(4), 1)];
        assert!(notices(Launcher::OpenMpi, &ranks)[0].starts_with("3 of 4 CPUs lie idle: rank 1 is bound to 2;"));
    }

    #[test]
    fn threads_that_take_turns_are_told() {
        let four = [(HOST, "0-3", Some(4), 4), (HOST, "0-3", Some(4), 4)];
        assert_eq!(
            notices(Launcher::OpenMpi, &four),
            ["8 threads share 4 CPUs (0-3), and take turns; set RAYON_NUM_THREADS=2, or leave it unset"]
        );
        // Two of three ranks on one socket of 32.
        let sockets = [(HOST, "0-31", Some(64), 21), (HOST, "32-63", Some(64), 21), (HOST, "0-31", Some(64), 21)];
        assert!(notices(Launcher::OpenMpi, &sockets)[0].starts_with("42 threads share 32 CPUs (0-31)"));
        let many = [(HOST, "0-1", Some(2), 1); 3];
        assert!(
            notices(Launcher::OpenMpi, &many)[0].starts_with("3 threads share 2 CPUs (0-1): more processes than CPUs")
        );
        // A core of its own inside of what another may use counts there as well.
        let nested = [(HOST, "0-1", Some(2), 2), (HOST, "1", Some(2), 1)];
        assert!(notices(Launcher::OpenMpi, &nested)[0].starts_with("3 threads share 2 CPUs (0-1)"));
        // Other machines have other CPUs.
        assert!(notices(Launcher::OpenMpi, &[("a", "0-3", Some(4), 4), ("b", "0-3", Some(4), 4)]).is_empty());
        // A process by itself, with a variable that is set too high.
        let alone = made(None, &[(HOST, "0-1", None, 8)]).notices();
        assert_eq!(alone, ["8 threads share 2 CPUs (0-1), and take turns; set RAYON_NUM_THREADS=2, or leave it unset"]);
    }

    #[test]
    fn the_header_shows_threads_and_allowed_cpus() {
        let line = |ranks: &[(&str, &str, Option<usize>, usize)]| made(None, ranks).line();
        assert_eq!(line(&[(HOST, "0-2,5", None, 4)]), "4 threads on 4 allowed CPUs (0-2,5)");
        assert_eq!(line(&[(HOST, "0", None, 1), (HOST, "1", None, 1)]), "1 thread on 1 allowed CPU for each process");
        let uneven = [(HOST, "0-1", None, 2), (HOST, "2-3", None, 2), ("b", "0", None, 1)];
        assert_eq!(line(&uneven), "1 to 2 threads on 1 to 2 allowed CPUs for each process");
        let unknown = Cpus { ranks: vec![RankCpus { known: None, threads: 4 }], launcher: None };
        assert_eq!((unknown.line().as_str(), unknown.notices().len()), ("4 threads", 0));
    }

    #[test]
    fn ranks_tell_each_other() {
        let known = made(None, &[(HOST, "0-3,8", Some(12), 5), ("other host x", "7", None, 1)]).ranks;
        for rank in known.iter().chain(&[RankCpus { known: None, threads: 3 }]) {
            assert_eq!(RankCpus::parse(&rank.to_text()).as_ref(), Some(rank));
        }
        for wrong in ["", "4", "4\t?\t0-3", "x\t?\t0-3\thost", "4\tx\t0-3\thost", "4\t?\tx\thost"] {
            assert_eq!(RankCpus::parse(wrong), None, "{wrong}");
        }
        let here = RankCpus::of_this_process(&Launch::alone());
        assert_eq!(RankCpus::parse(&here.to_text()), Some(here));
    }
}
