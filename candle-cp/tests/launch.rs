//! The launch environment, from tables instead of this process's own variables.

use candle_cp::launch::MeetingPlace;
use candle_cp::{LaunchEnvironment, Launcher, Result, launch_environment_from};

type Table<'a> = &'a [(&'a str, &'a str)];

const TORCHRUN: [(&str, &str); 5] =
    [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node-0"), ("MASTER_PORT", "29500")];
const OPEN_MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];
const PMI: [(&str, &str); 4] =
    [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
const SLURM: [(&str, &str); 8] = [
    ("SLURM_PROCID", "6"),
    ("SLURM_STEP_NUM_TASKS", "7"),
    ("SLURM_NTASKS", "16"),
    ("SLURM_LOCALID", "2"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "4,3"),
    ("SLURM_STEP_NODELIST", "gpu[03-04]"),
    ("SLURM_CPUS_ON_NODE", "48"),
];

fn read(variables: Table) -> Result<Option<LaunchEnvironment>> {
    launch_environment_from(|name| variables.iter().rfind(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
}

fn some(variables: Table) -> LaunchEnvironment {
    read(variables).unwrap().unwrap()
}

fn refused(variables: Table) -> String {
    read(variables).unwrap_err().to_string()
}

fn with(changes: Table) -> Result<Option<LaunchEnvironment>> {
    read(&[&TORCHRUN[..], changes].concat())
}

fn at(address: &str, port: u16) -> Option<MeetingPlace> {
    Some(MeetingPlace { address: address.to_string(), port })
}

#[test]
fn each_launcher_is_understood() {
    let torchrun = LaunchEnvironment {
        launcher: Launcher::Torchrun,
        rank: 5,
        size: 8,
        local_rank: Some(1),
        local_size: None,
        machine_cpus: None,
        meeting: at("node-0", 29500),
        others: Vec::new(),
    };
    assert_eq!(some(&TORCHRUN), torchrun);
    assert_eq!(with(&[("LOCAL_WORLD_SIZE", "4")]).unwrap().unwrap().local_size, Some(4));
    let open_mpi = LaunchEnvironment {
        launcher: Launcher::OpenMpi,
        rank: 3,
        size: 4,
        local_size: Some(2),
        meeting: None,
        ..torchrun.clone()
    };
    assert_eq!(some(&OPEN_MPI), open_mpi);
    let bare = LaunchEnvironment { local_rank: None, local_size: None, ..open_mpi };
    assert_eq!(some(&OPEN_MPI[..2]), bare);
    let pmi = LaunchEnvironment {
        launcher: Launcher::Pmi,
        rank: 1,
        size: 2,
        local_size: Some(2),
        meeting: at("localhost", 29500),
        ..torchrun.clone()
    };
    assert_eq!(some(&PMI), pmi);
    let slurm = LaunchEnvironment {
        launcher: Launcher::Slurm,
        rank: 6,
        size: 7,
        local_rank: Some(2),
        local_size: Some(3),
        machine_cpus: Some(48),
        meeting: at("gpu03", 29500),
        ..torchrun
    };
    assert_eq!(some(&SLURM), slurm);
    assert_eq!(read(&[]).unwrap(), None);
    let empty = [("PATH", "/bin"), ("RANK", ""), ("PMI_SIZE", " "), ("TORCHELASTIC_USE_AGENT_STORE", "True")];
    assert_eq!(read(&empty).unwrap(), None);
}

#[test]
fn the_first_launcher_decides_alone_and_the_others_are_named() {
    let all = [&SLURM[..], &PMI, &OPEN_MPI, &TORCHRUN].concat();
    let alone = [some(&TORCHRUN), some(&OPEN_MPI), some(&PMI), some(&SLURM)];
    let mut left = all;
    for (launcher, alone) in Launcher::ALL.into_iter().zip(alone) {
        let others: Vec<_> = Launcher::ALL.into_iter().filter(|&other| other > launcher).collect();
        // What torchrun left out of its part is where the ranks meet.
        let found = some(&left);
        assert_eq!(found, LaunchEnvironment { others, ..alone });
        let names = [launcher.rank_variable(), launcher.size_variable()];
        left.retain(|(name, _)| {
            !names.contains(name) && (launcher != Launcher::Torchrun || !name.starts_with("MASTER"))
        });
    }
    let beneath = some(&[&TORCHRUN[..], &SLURM].concat());
    assert_eq!(beneath.to_string(), "started by torchrun (variables of srun were seen too and not used)");
    assert_eq!(some(&OPEN_MPI).to_string(), "started by mpirun of OpenMPI");
    // Half of a launcher that comes first is an error, whatever comes after it.
    for (half, missing) in [
        (("RANK", "0"), "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing or empty"),
        (("OMPI_COMM_WORLD_SIZE", "4"), "OMPI_COMM_WORLD_RANK is missing or empty"),
        (("PMI_SIZE", "8"), "PMI_RANK is missing or empty"),
    ] {
        let text = refused(&[&SLURM[..], &[half]].concat());
        let (name, value) = half;
        assert!(text.starts_with(&format!("the launch environment is {name}={value}, but {missing}; ")), "{text}");
        assert!(text.ends_with(&format!("unset {name}")), "{text}");
    }
    // What comes after it may be anything.
    assert_eq!(some(&[&OPEN_MPI[..], &[("PMI_SIZE", "x"), ("SLURM_NTASKS", "9")]].concat()).size, 4);
}

#[test]
fn one_process_of_torchrun_needs_no_meeting() {
    let one = some(&[("RANK", "0"), ("WORLD_SIZE", "1")]);
    assert_eq!((one.rank, one.size, one.local_rank, one.local_size), (0, 1, Some(0), Some(1)));
    let text = refused(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "n1")]);
    assert!(text.contains("MASTER_PORT is missing or empty"), "{text}");
}

#[test]
fn a_shell_of_slurm_is_one_process_or_an_error() {
    // The script of a job: SLURM_NTASKS is only there if the job asked for a number.
    for script in [&[("SLURM_PROCID", "0")][..], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]] {
        let place = some(script);
        assert_eq!((place.launcher, place.rank, place.size), (Launcher::Slurm, 0, 1));
    }
    for shell in [&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")][..], &[("SLURM_NTASKS", "8")]] {
        let text = refused(shell);
        assert!(text.contains("SLURM_NTASKS=8, but without SLURM_STEP_NUM_TASKS"), "{text}");
        assert!(text.contains("not one of the 8") && text.contains("write srun before the program"), "{text}");
    }
    assert_eq!(read(&[("SLURM_NTASKS", "1")]).unwrap(), None);
    // An interactive shell of a larger job is a step of one.
    let shell = some(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_NTASKS", "8")]);
    assert_eq!((shell.rank, shell.size), (0, 1));
    assert!(refused(&[("SLURM_PROCID", "3")]).contains("SLURM_STEP_NUM_TASKS is missing or empty"));
    assert!(refused(&[("SLURM_STEP_NUM_TASKS", "3")]).contains("SLURM_PROCID is missing or empty"));
}

#[test]
fn srun_that_speaks_pmi_knows_the_machines() {
    let pmi = [("PMI_RANK", "6"), ("PMI_SIZE", "7")];
    let place = some(&[&SLURM[..], &pmi].concat());
    let slurm = some(&SLURM);
    assert_eq!(place, LaunchEnvironment { launcher: Launcher::Pmi, others: vec![Launcher::Slurm], ..slurm });
    // Of another group than Slurm's nothing is taken.
    let place = some(&[&SLURM[..], &[("PMI_RANK", "6"), ("PMI_SIZE", "8")]].concat());
    assert_eq!((place.local_rank, place.local_size, place.meeting, place.machine_cpus), (None, None, None, None));
}

#[test]
fn ranks_meet_where_it_is_said_or_on_their_one_machine() {
    const SAID: [(&str, &str); 2] = [("MASTER_ADDR", "n7"), ("MASTER_PORT", "1234")];
    for table in [&OPEN_MPI[..], &PMI, &SLURM] {
        assert_eq!(some(&[table, &SAID].concat()).meeting, at("n7", 1234));
        for half in SAID {
            let text = refused(&[table, &[half]].concat());
            let other = if half.0 == "MASTER_ADDR" { "MASTER_PORT" } else { "MASTER_ADDR" };
            assert!(text.contains(&format!("{}={}, but {other} is missing or empty", half.0, half.1)), "{text}");
        }
    }
    let one_machine = some(&[&OPEN_MPI[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]].concat());
    assert_eq!(one_machine.meeting().unwrap(), &at("localhost", 29500).unwrap());
    let several = some(&OPEN_MPI).meeting().unwrap_err().to_string();
    assert!(several.contains("the 4 ranks that mpirun of OpenMPI started may be on several machines"), "{several}");
    assert!(several.contains("set MASTER_ADDR to the machine of rank 0 and MASTER_PORT"), "{several}");
    let text = refused(&[&SLURM[..], &[("SLURM_STEP_NODELIST", "gpu[")]].concat());
    assert!(text.contains("SLURM_STEP_NODELIST is \"gpu[\", but a list of machines"), "{text}");
    assert_eq!(some(&[&SLURM[..], &[("SLURM_STEP_NODELIST", "")]].concat()).meeting, None);
}

#[test]
fn the_port_of_an_agent_is_left_to_it() {
    let port = |store| with(&[("TORCHELASTIC_USE_AGENT_STORE", store)]).unwrap().unwrap().meeting.unwrap().port;
    assert_eq!([port("True"), port("False"), port("")], [29501, 29500, 29500]);
    let error = with(&[("MASTER_PORT", "65535"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]).unwrap_err().to_string();
    assert!(error.contains("MASTER_PORT is 65535, but ports go from 1 to 65534"), "{error}");
}

#[test]
fn half_an_environment_lists_what_is_there_and_what_is_not() {
    for keep in 1..31u32 {
        let kept: Vec<_> = TORCHRUN.iter().enumerate().filter(|(i, _)| keep >> i & 1 == 1).map(|(_, v)| *v).collect();
        let error = refused(&kept);
        let (found, missing) = error.split_once(", but ").unwrap();
        for (i, (name, value)) in TORCHRUN.iter().enumerate() {
            let kept = keep >> i & 1 == 1;
            assert_eq!(found.contains(&format!("{name}={value}")), kept, "{error}");
            let missing = missing.split(';').next().unwrap();
            assert_eq!(missing.split([' ', ',']).any(|word| word == *name), !kept, "{error}");
        }
    }
    let one = with(&[("LOCAL_RANK", " ")]).unwrap_err().to_string();
    assert!(one.contains("LOCAL_RANK is missing or empty"), "{one}");
}

#[test]
fn values_that_make_no_sense_are_named() {
    for (table, name, value, part) in [
        (&TORCHRUN[..], "RANK", "8", "RANK is 8, but WORLD_SIZE is 8, which makes the ranks 0..8"),
        (&TORCHRUN, "WORLD_SIZE", "0", "WORLD_SIZE is 0"),
        (&TORCHRUN, "RANK", "-1", "RANK is \"-1\", but a whole number is expected"),
        (&TORCHRUN, "WORLD_SIZE", "two", "WORLD_SIZE is \"two\""),
        (&TORCHRUN, "LOCAL_RANK", "0x1", "LOCAL_RANK is \"0x1\""),
        (&TORCHRUN, "LOCAL_WORLD_SIZE", "1", "LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1"),
        (&TORCHRUN, "LOCAL_WORLD_SIZE", "9", "LOCAL_WORLD_SIZE is 9, but there are 8 processes"),
        (&TORCHRUN, "MASTER_PORT", "http", "MASTER_PORT is \"http\""),
        (&TORCHRUN, "MASTER_PORT", "0", "MASTER_PORT is 0, but ports go from 1 to 65535"),
        (&TORCHRUN, "MASTER_PORT", "70000", "MASTER_PORT is 70000"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_RANK", "4", "OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"),
        (&OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "4.0", "OMPI_COMM_WORLD_SIZE is \"4.0\""),
        (&OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "2", "OMPI_COMM_WORLD_LOCAL_RANK is 2, but "),
        (&PMI, "PMI_RANK", "2", "PMI_RANK is 2, but PMI_SIZE is 2"),
        (&PMI, "MPI_LOCALNRANKS", "x", "MPI_LOCALNRANKS is \"x\""),
        (&SLURM, "SLURM_PROCID", "7", "SLURM_PROCID is 7, but SLURM_STEP_NUM_TASKS is 7"),
        (&SLURM, "SLURM_LOCALID", "x", "SLURM_LOCALID is \"x\""),
        (&SLURM, "SLURM_CPUS_ON_NODE", "x", "SLURM_CPUS_ON_NODE is \"x\""),
        (&[], "MV2_COMM_WORLD_SIZE", "4", "MV2_COMM_WORLD_SIZE is 4, but the processes of this launcher"),
    ] {
        let error = refused(&[table, &[(name, value)]].concat());
        assert!(error.contains(part), "{name}={value}: {error}");
    }
    assert_eq!(read(&[("MV2_COMM_WORLD_SIZE", "1")]).unwrap(), None);
}
