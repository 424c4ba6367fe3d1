//! Which CPUs a process may use, and which ones its launcher may use.

use super::{LaunchEnvironment, Launcher};
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::str::FromStr;

/// Most CPUs of a machine that a list may have; larger numbers are a mistake.
const MOST_CPUS: usize = 1 << 16;
/// Longest way from a process to its launcher: shells and wrappers between the two.
const MOST_ANCESTORS: usize = 64;

/// Some of a machine's CPUs, by number. As a text: `0-3,8`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuSet(BTreeSet<usize>);

impl CpuSet {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all of these are among `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }

    /// Those of both.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    /// Those that are not among `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        Self(numbers.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for &cpu in &self.0 {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let text = |&(first, last): &(usize, usize)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        f.write_str(&ranges.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

impl FromStr for CpuSet {
    /// What is allowed.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("numbers and ranges of CPUs such as 0-3,8, each below {MOST_CPUS}");
        let number = |text: &str| text.parse::<usize>().ok().filter(|&cpu| cpu < MOST_CPUS).ok_or_else(wrong);
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

/// The CPUs of this process, as the system tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessCpus {
    /// The machine: name and what tells its running system from others.
    pub machine: String,
    /// What this process may use.
    pub allowed: CpuSet,
    /// How many CPUs of this machine its launcher may use; `None` if nothing started it as one of a group, or nobody says.
    pub launcher: Option<usize>,
}

impl ProcessCpus {
    /// Asks the system about the process that was started as `place` says. `None` where it does not tell (Linux does).
    pub fn read(place: Option<&LaunchEnvironment>) -> Option<Self> {
        let kernel = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok();
        let machine = format!("{} {}", kernel("hostname")?.trim(), kernel("random/boot_id")?.trim());
        let status = Status::read("self")?;
        let launcher = place.and_then(|place| {
            let own = launcher_cpus(place.launcher, status.parent).map(|cpus| cpus.len());
            // Slurm's own process may use all of the machine, whatever the job was given.
            own.into_iter().chain(place.machine_cpus).min()
        });
        Some(Self { machine, allowed: status.allowed, launcher })
    }
}

/// What `/proc/<pid>/status` tells.
struct Status {
    parent: usize,
    allowed: CpuSet,
}

impl Status {
    fn read(process: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{process}/status")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let parent = value("PPid")?.trim().parse().ok()?;
        Some(Self { parent, allowed: value("Cpus_allowed_list")?.parse().ok()? })
    }
}

/// The launcher is the nearest ancestor that was not told a rank itself: there may be shells between.
fn launcher_cpus(launcher: Launcher, parent: usize) -> Option<CpuSet> {
    let told = format!("{}=", launcher.rank_variable());
    let mut process = parent;
    for _ in 0..MOST_ANCESTORS {
        let status = Status::read(&process.to_string())?;
        // Another user's process, such as the one that srun leaves on each machine, does not say.
        let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        if !variables.split(|&byte| byte == 0).any(|variable| variable.starts_with(told.as_bytes())) {
            return Some(status.allowed);
        }
        process = status.parent;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, numbers) in
            [("0-3,8", vec![0, 1, 2, 3, 8]), ("5", vec![5]), ("", vec![]), ("0-1,3-4", vec![0, 1, 3, 4])]
        {
            let set: CpuSet = numbers.into_iter().collect();
            assert_eq!(text.parse(), Ok(set.clone()));
            assert_eq!(set.to_string(), text);
        }
        assert_eq!(" 3,1,2,2\n".parse::<CpuSet>().unwrap().to_string(), "1-3");
        for wrong in ["a", "3-1", "1,,2", "1-", "-1", "0-65536", "1 2"] {
            assert!(wrong.parse::<CpuSet>().unwrap_err().contains("0-3,8"), "{wrong}");
        }
    }

    #[test]
    fn sets_are_compared() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(set("0-3").union(&set("2-5,9")), set("0-5,9"));
        assert_eq!(set("0-3").without(&set("1-2,9")), set("0,3"));
        assert!(set("1-2").is_subset(&set("0-3")) && !set("1-4").is_subset(&set("0-3")));
        assert!(set("").is_empty() && set("").is_subset(&set("")) && set("7-8").len() == 2);
    }

    #[test]
    fn status_files_are_read() {
        let status = Status::parse("Name:\tx\nPPid:\t17\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n").unwrap();
        assert_eq!((status.parent, status.allowed.to_string().as_str()), (17, "0-3"));
        assert!(Status::parse("PPid:\t17\n").is_none());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_cpus() {
        let cpus = ProcessCpus::read(None).unwrap();
        assert!(!cpus.allowed.is_empty() && cpus.launcher.is_none() && cpus.machine.contains(' '));
        let available = std::thread::available_parallelism().unwrap().get();
        assert!(available <= cpus.allowed.len());
    }
}
