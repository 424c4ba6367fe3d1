//! Environments that users of other systems ran into, each with the right outcome.

use candle_cp::{LaunchEnvironment, Launcher, launch_environment_from};
use candle_finetune::{Config, Job, Launch, Ranks, layered_settings};
use serde_json::{Map, Value};

const CASES: &str = include_str!("../../fixtures/cases/environment.json");

/// The variables of one case, which is known by its outcome.
fn environment(right: &str) -> Map<String, Value> {
    let cases: Vec<Map<String, Value>> = serde_json::from_str(CASES).unwrap();
    assert_eq!(cases.len(), 9);
    let mut fits = cases.into_iter().filter(|case| case["right"] == right);
    let found = fits.next().unwrap_or_else(|| panic!("{right}"));
    assert!(fits.next().is_none());
    found["env"].as_object().unwrap().clone()
}

fn lookup(environment: &Map<String, Value>) -> impl Fn(&str) -> Option<String> {
    |name| environment.get(name).map(|value| value.as_str().unwrap().to_string())
}

fn read(right: &str) -> candle_cp::Result<Option<LaunchEnvironment>> {
    launch_environment_from(lookup(&environment(right)))
}

/// The text of the error, which `--comm threads` never meets.
fn refused(right: &str) -> String {
    let environment = environment(right);
    let settings =
        |flags: &[(&str, &str)]| layered_settings(Config::default(), None, flags, false, lookup(&environment));
    let error = settings(&[]).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("--comm threads"), "{error}");
    assert_eq!(settings(&[("--comm", "threads")]).unwrap().launch, Launch::alone());
    read(right).unwrap_err().to_string()
}

#[test]
fn rank_without_world_size() {
    let text = refused("error: WORLD_SIZE missing; lists what was found");
    let (found, missing) = text.split_once(", but ").unwrap();
    assert_eq!(found, "the launch environment is RANK=3 MASTER_ADDR=n1");
    assert!(missing.starts_with("WORLD_SIZE, LOCAL_RANK, MASTER_PORT are missing or empty"), "{text}");
    assert!(text.ends_with("unset RANK MASTER_ADDR"), "{text}");
}

#[test]
fn world_size_without_rank() {
    let text = refused("error: RANK missing");
    assert!(text.starts_with("the launch environment is WORLD_SIZE=4, but RANK, "), "{text}");
}

#[test]
fn a_rank_outside_of_its_world() {
    let text = refused("error: rank 4 of 4");
    assert!(text.starts_with("RANK is 4, but WORLD_SIZE is 4, which makes the ranks 0..4"), "{text}");
}

#[test]
fn empty_variables_count_as_unset() {
    assert_eq!(read("as if unset, or an error; never rank 0 of 0").unwrap(), None);
}

#[test]
fn a_world_size_in_words() {
    let text = refused("error: names the variable and its value");
    assert!(text.starts_with("WORLD_SIZE is \"two\", but a whole number is expected"), "{text}");
}

#[test]
fn one_task_of_slurm() {
    let right = "one process; no MPI needed";
    let place = read(right).unwrap().unwrap();
    assert_eq!((place.launcher, place.rank, place.size), (Launcher::Slurm, 0, 1));
    let config = layered_settings(Config::default(), None, &[], false, lookup(&environment(right))).unwrap();
    assert!(config.launch.is_first());
    assert!(matches!(config.launch.ranks(&config).unwrap(), Ranks::Threads(2)));
}

#[test]
fn pmi_of_an_earlier_shell() {
    let text = refused("left over from an interactive srun: error or one process, and it says which");
    assert!(text.starts_with("the launch environment is PMI_SIZE=8, but PMI_RANK is missing or empty"), "{text}");
    assert!(text.ends_with("if they are left over, unset PMI_SIZE"), "{text}");
}

#[test]
fn two_launchers() {
    let right = "the documented order wins, and the header line says that two launchers were seen";
    let place = read(right).unwrap().unwrap();
    assert_eq!((place.launcher, place.rank, place.size), (Launcher::Torchrun, 0, 1));
    assert_eq!(place.others, [Launcher::OpenMpi]);
    let config = layered_settings(Config::default(), None, &[], false, lookup(&environment(right))).unwrap();
    let header = Job::prepare(&config).unwrap().header(&config);
    let device = &header.iter().find(|(name, _)| *name == "device").unwrap().1;
    let said = "; started by torchrun (variables of mpirun of OpenMPI were seen too and not used)";
    assert!(device.starts_with("CPU, ") && device.ends_with(said), "{device}");
}

#[test]
fn a_port_out_of_range() {
    let text = refused("error: port out of range");
    assert!(text.starts_with("MASTER_PORT is 70000, but ports go from 1 to 65535"), "{text}");
}

/// What a launcher says counts for the process that it started, not for the run that goes on.
#[test]
fn threads_are_asked_for_in_any_layer() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    std::fs::write(&file, "[parallel]\ncomm = \"threads\"\n").unwrap();
    let variables = |name: &str| (name == "PMI_SIZE").then(|| "8".to_string());
    let config = layered_settings(Config::default(), Some(&file), &[], false, variables).unwrap();
    assert_eq!(config.launch, Launch::alone());
    assert!(layered_settings(Config::default(), Some(&file), &[("--comm", "auto")], false, variables).is_err());
}
