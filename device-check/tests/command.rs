//! The program as it is run on a machine with a GPU, here on a driver that is the emulator.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_device-check"));
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).args(arguments);
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().expect("an exit code"), text(stdout), text(stderr))
}

/// The example `emulated_driver`, which is built with the tests.
fn emulated_driver() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.ancestors().nth(2).unwrap().join("examples/libemulated_driver.so");
    assert!(path.exists(), "{} is missing: cargo build --example emulated_driver", path.display());
    path
}

#[test]
fn a_missing_driver_is_named() {
    let (code, _, error) = run(&["--check", "--driver", "libno_such_driver.so.1"]);
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("libno_such_driver.so.1 cannot be used"), "{error}");
    assert!(error.contains("comes with the NVIDIA driver (r550 or newer)"), "{error}");
}

#[test]
fn a_library_that_is_no_driver_is_named() {
    let (code, _, error) = run(&["--check", "--driver", "libc.so.6"]);
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("libc.so.6 cannot be used") && error.contains("cuInit"), "{error}");
}

#[test]
fn a_missing_device_is_named() {
    let driver = emulated_driver();
    let (code, _, error) = run(&["--driver", driver.to_str().unwrap(), "--device", "3"]);
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("device 3 does not exist: the driver has 1"), "{error}");
}

#[test]
fn the_script_files_what_the_device_gives() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("filed");
    let _ = std::fs::remove_dir_all(&folder);
    let driver = emulated_driver();
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/device-check"))
        .args(["--check", "--binary", env!("CARGO_BIN_EXE_device-check"), "--", "--random", "12"])
        .args(["--longest", "20,20,16,12", "--driver", driver.to_str().unwrap()])
        .env("OUT", &folder)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let files: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("one file: {files:?}") };
    assert!(file.file_name().unwrap().to_str().unwrap().starts_with("gpu_ptx-emulator_20"), "{files:?}");
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.starts_with("# Attention kernels on PTX emulator, 20"), "{text}");
    assert!(text.contains("Device: PTX emulator, compute capability 9.0, 132 multiprocessors"), "{text}");
    assert!(text.contains("72 checks, 0 failed; 60 of 76 kernels ran"), "{text}");
    assert!(text.contains("| Bf16 | 512 |") && !text.contains("## Rates"), "{text}");
}

#[test]
fn recorded_results_have_to_be_there() {
    let driver = emulated_driver();
    let (code, _, error) = run(&["--driver", driver.to_str().unwrap(), "--fixtures", "fixtures/none"]);
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("fixtures/none/index.json"), "{error}");
}
