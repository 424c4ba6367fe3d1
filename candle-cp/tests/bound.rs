//! What real processes of OpenMPI find out about their CPUs: this program starts itself under `mpirun`, if there is one.

use candle_cp::launch::ProcessCpus;
use candle_cp::{LaunchEnvironment, Launcher, launch_environment, prepare_rank_process};
use std::process::Command;

/// The argument of a rank.
const RANK: &str = "as-a-rank";
const PROCESSES: usize = 2;

/// Rank, allowed CPUs, the launcher's CPUs and threads.
type Told = [usize; 4];

fn tell(place: &LaunchEnvironment) {
    assert_eq!((place.launcher, place.size, place.local_size), (Launcher::OpenMpi, PROCESSES, Some(PROCESSES)));
    // SAFETY: nothing has started a thread yet.
    unsafe { prepare_rank_process(place) };
    let cpus = ProcessCpus::read(Some(place)).expect("the system tells");
    let threads = |name| std::env::var(name).unwrap();
    assert_eq!(threads("RAYON_NUM_THREADS"), threads("CANDLE_NUM_THREADS"));
    assert_eq!(rayon::current_num_threads().to_string(), threads("RAYON_NUM_THREADS"));
    let launcher = cpus.launcher.expect("mpirun is an ancestor");
    println!("told {} {} {launcher} {}", place.rank, cpus.allowed.len(), threads("RAYON_NUM_THREADS"));
}

/// What the ranks tell; `None` if they could not be started.
fn started(flags: &[&str], shell: bool) -> Option<Vec<Told>> {
    let program = std::env::current_exe().unwrap().display().to_string();
    let mut command = Command::new("mpirun");
    for (name, _) in std::env::vars().filter(|(name, _)| name.ends_with("_NUM_THREADS")) {
        command.env_remove(name);
    }
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"] {
        command.env(name, "1");
    }
    command.args(["-n", &PROCESSES.to_string()]).args(flags);
    match shell {
        true => command.args(["sh", "-c", &format!("'{program}' {RANK}; true")]),
        false => command.args([&program, RANK]),
    };
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let told = |line: &str| {
        let numbers: Vec<usize> = line.strip_prefix("told ")?.split(' ').map(|n| n.parse().unwrap()).collect();
        numbers.try_into().ok()
    };
    let mut told: Vec<Told> = text.lines().filter_map(told).collect();
    told.sort();
    assert!(told.is_empty() || told.len() == PROCESSES, "{text}{}", String::from_utf8_lossy(&output.stderr));
    (!told.is_empty()).then_some(told)
}

fn main() {
    if std::env::args().any(|argument| argument == RANK) {
        return tell(&launch_environment().unwrap().expect("mpirun tells"));
    }
    let Some(bound) = started(&["--bind-to", "core"], false) else {
        return println!("not tested: mpirun of OpenMPI is not there or starts nothing");
    };
    let free = started(&["--bind-to", "none"], false).unwrap();
    println!("[rank, allowed CPUs, launcher's CPUs, threads]: bound {bound:?}, not bound {free:?}");
    let all = free[0][2];
    for told in [&bound, &free] {
        for (rank, &[number, allowed, launcher, threads]) in told.iter().enumerate() {
            assert_eq!((number, launcher), (rank, all));
            assert!((1..=allowed).contains(&threads));
            assert_eq!(threads, (all / PROCESSES).clamp(1, allowed));
        }
    }
    assert!(free.iter().all(|&[_, allowed, ..]| allowed == all));
    assert!(bound.iter().all(|&[_, allowed, ..]| allowed <= all));
    // A shell between, which is bound itself, is not taken for the launcher.
    assert_eq!(started(&["--bind-to", "core"], true).unwrap(), bound);
}
