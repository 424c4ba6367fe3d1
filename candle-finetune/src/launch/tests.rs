use super::*;

/// As torchrun tells on one machine.
fn launch(rank: usize, size: usize, more: &[(&str, &str)]) -> Result<Launch> {
    let (rank, size) = (rank.to_string(), size.to_string());
    let torchrun = [
        ("RANK", &*rank),
        ("WORLD_SIZE", &size),
        ("LOCAL_RANK", &rank),
        ("MASTER_ADDR", "node-0"),
        ("MASTER_PORT", "29500"),
    ];
    from(&[&torchrun[..], more].concat())
}

fn from(table: &[(&str, &str)]) -> Result<Launch> {
    Launch::from_vars(|name| table.iter().rfind(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
}

/// As OpenMPI tells on several machines.
fn mpirun(rank: &str, size: &str) -> Launch {
    from(&[("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", size), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")])
        .unwrap()
}

fn config(device: &str, cp: usize) -> Config {
    Config { device: device.parse().unwrap(), cp, ..Config::default() }
}

fn over(comm: Transport, device: &str, cp: usize) -> Config {
    Config { comm, ..config(device, cp) }
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
    // What a launcher of one process says changes nothing.
    let slurm = from(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]).unwrap();
    for one in [&alone, &launch(0, 1, &[]).unwrap(), &mpirun("0", "1"), &slurm] {
        assert!(one.is_first());
        for (device, cp) in [("cpu", 1), ("cpu", 4), ("cuda", 1), ("cuda:3", 1)] {
            assert_eq!(one.choose(&config(device, cp)).unwrap(), Choice::Threads);
        }
        assert!(matches!(one.ranks(&config("cpu", 4)).unwrap(), Ranks::Threads(4)));
        let text = refused(one, &config("cuda:1", 4));
        assert!(text.starts_with("--cp \"4\": allowed is 1 in one process beside --device cuda:1"), "{text}");
        let line = "start torchrun --no-python --nproc-per-node 4 target/release/examples/finetune_gemma4 --device cuda \
                    --cp 4";
        assert!(text.ends_with(line), "{text}");
        assert_eq!(text.contains("cargo build --release --features nccl"), !cfg!(feature = "nccl"), "{text}");
    }
}

#[test]
fn processes_on_cpus_talk_over_mpi() {
    for comm in [Transport::Auto, Transport::Mpi] {
        for (second, name) in [(mpirun("2", "4"), "OMPI_COMM_WORLD_SIZE"), (launch(2, 4, &[]).unwrap(), "WORLD_SIZE")] {
            assert!(!second.is_first());
            for cp in [1, 2, 4] {
                let config = over(comm, "cpu", cp);
                if cfg!(feature = "mpi") {
                    assert_eq!(second.choose(&config).unwrap(), Choice::Mpi(second.place()));
                    continue;
                }
                let text = refused(&second, &config);
                let start =
                    format!("{name} \"4\": allowed is 1 on CPUs: this program was built without the feature `mpi`");
                assert!(text.starts_with(&start), "{text}");
                assert!(text.contains("cargo build --release --features mpi --example finetune_gemma4"), "{text}");
                let line = format!("mpirun -n 4 --bind-to none target/release/examples/finetune_gemma4 --cp {cp};");
                assert!(text.contains(&line) && text.contains("--comm threads"), "{text}");
            }
        }
    }
}

#[test]
fn processes_with_gpus_talk_over_nccl() {
    let second = launch(2, 4, &[]).unwrap();
    for comm in [Transport::Auto, Transport::Nccl] {
        if !cfg!(feature = "nccl") {
            let text = refused(&second, &over(comm, "cuda", 4));
            assert!(text.starts_with("WORLD_SIZE \"4\": allowed is 1 with GPUs"), "{text}");
            assert!(
                text.contains("feature `nccl`") && text.contains("cargo build --release --features nccl"),
                "{text}"
            );
            continue;
        }
        for cp in [1, 2, 4] {
            let expected = Choice::Nccl(second.place().unwrap(), ComputeDevice::Cuda(Some(2)));
            assert_eq!(second.choose(&over(comm, "cuda", cp)).unwrap(), expected);
        }
        let text = refused(&second, &over(comm, "cuda:0", 4));
        assert!(text.starts_with("--device \"cuda:0\": allowed is cuda where several processes"), "{text}");
        let text = refused(&mpirun("1", "4"), &over(comm, "cuda", 4));
        assert!(text.contains("meeting place of the ranks") && text.contains("MASTER_ADDR"), "{text}");
        let unnumbered = from(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).unwrap();
        let text = refused(&unnumbered, &over(comm, "cuda", 2));
        assert!(text.contains("numbers the processes of each machine"), "{text}");
    }
}

#[test]
fn the_number_of_processes_is_a_multiple_of_cp() {
    let place = launch(2, 12, &[]).unwrap().place.unwrap();
    for cp in [1, 2, 3, 4, 6, 12] {
        check_replicas(&config("cpu", cp), &place).unwrap();
    }
    for (cp, nearest, more) in [(5, 4, 15), (7, 6, 14), (8, 6, 16), (13, 12, 13), (24, 12, 24)] {
        let error = check_replicas(&config("cpu", cp), &place).unwrap_err();
        let text = error.to_string();
        let start = format!(
            "--cp \"{cp}\": allowed is 1, 2, 3, 4, 6, 12: it has to divide the 12 processes that WORLD_SIZE says there are"
        );
        assert!(error.is_usage() && text.starts_with(&start), "{text}");
        assert!(text.ends_with(&format!("use --cp {nearest}, or start {more} processes")), "{text}");
    }
}

#[test]
fn what_ranks_talk_over_can_be_chosen() {
    // As threads, whoever started the process.
    for started in [Launch::alone(), launch(2, 4, &[]).unwrap(), mpirun("1", "2")] {
        assert_eq!(started.choose(&over(Transport::Threads, "cpu", 3)).unwrap(), Choice::Threads);
        let text = refused(&started, &over(Transport::Threads, "cuda", 3));
        assert!(text.starts_with("--cp \"3\": allowed is 1 in one process"), "{text}");
        let text = refused(&started, &over(Transport::Mpi, "cuda", 2));
        assert!(text.starts_with("--comm \"mpi\": allowed is nccl beside --device cuda"), "{text}");
        let text = refused(&started, &over(Transport::Nccl, "cpu", 2));
        assert!(text.starts_with("--comm \"nccl\": allowed is mpi or threads beside --device cpu"), "{text}");
    }
    for one in [Launch::alone(), launch(0, 1, &[]).unwrap()] {
        let text = refused(&one, &over(Transport::Nccl, "cuda", 2));
        assert!(text.starts_with("--comm \"nccl\": allowed is auto or threads in one process"), "{text}");
        assert!(text.contains("torchrun --no-python --nproc-per-node 2"), "{text}");
        let line = "mpirun -n 2 --bind-to none target/release/examples/finetune_gemma4 --cp 2";
        let text = refused(&one, &over(Transport::Mpi, "cpu", 2));
        assert!(text.contains(&format!("start {line}")), "{text}");
        if cfg!(feature = "mpi") {
            assert!(text.starts_with("--cp \"2\": allowed is 1 in one process beside --comm mpi"), "{text}");
            assert_eq!(one.choose(&over(Transport::Mpi, "cpu", 1)).unwrap(), Choice::Mpi(one.place()));
        } else {
            assert!(text.starts_with("--comm \"mpi\": allowed is threads: this program was built without"), "{text}");
        }
    }
}

#[test]
fn half_an_environment_is_refused() {
    let error = launch(1, 4, &[("MASTER_PORT", "")]).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.contains("MASTER_PORT is missing or empty"), "{text}");
    assert!(text.ends_with("; --comm threads reads none of these variables"), "{text}");
    let error = from(&[("MV2_COMM_WORLD_SIZE", "4")]).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("MV2_COMM_WORLD_SIZE is 4"), "{error}");
}

#[test]
fn mpi_has_to_say_what_the_launcher_said() {
    let place = mpirun("1", "4").place.unwrap();
    check_world(Some(&place), 1, 4).unwrap();
    check_world(None, 0, 1).unwrap();
    // Another MPI's mpirun: every process is alone.
    let error = check_world(Some(&place), 0, 1).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage(), "{text}");
    assert!(text.starts_with("mpirun of OpenMPI says that this is rank 1 of 4, but MPI says rank 0 of 1"), "{text}");
    assert!(text.contains("linked with another MPI") && text.contains("--comm threads"), "{text}");
    assert!(check_world(Some(&place), 2, 4).is_err());
    // Slurm was not told which protocol.
    let of_slurm = LaunchEnvironment { launcher: candle_cp::Launcher::Slurm, ..place.clone() };
    let text = check_world(Some(&of_slurm), 0, 1).unwrap_err().to_string();
    assert!(text.starts_with("srun says that this is rank 1 of 4") && text.contains("--mpi=pmix"), "{text}");
    let text = check_world(None, 1, 4).unwrap_err().to_string();
    assert!(
        text.starts_with("no launcher says that this is one of several processes, but MPI says rank 1 of 4"),
        "{text}"
    );
}
