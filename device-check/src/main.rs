//! Checks the attention kernels on an NVIDIA GPU, then measures them. `scripts/device-check` calls this.

use clap::Parser;
use device_check::{Budget, CudaDevice, DRIVER, Error, LENGTHS, Measurement, Report, Result, Sizes};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Checks the attention kernels on an NVIDIA GPU against recorded results and a reference on the CPU, then measures them.
///
/// Exits with 1 if a result is wrong, and with 2 if the check cannot be made.
#[derive(Parser)]
struct Options {
    /// Only check; measure nothing.
    #[arg(long)]
    check: bool,
    /// Number of the device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// The driver's library.
    #[arg(long, default_value = DRIVER)]
    driver: PathBuf,
    /// Folder of recorded results.
    #[arg(long, default_value = "fixtures/attention")]
    fixtures: PathBuf,
    /// Random cases.
    #[arg(long, default_value_t = 480)]
    random: usize,
    /// The most tokens of a random case with head size 64, 128, 256 and 512.
    #[arg(long, value_parser = sizes, default_value = "600,400,300,200")]
    longest: Sizes,
    /// Seconds for measuring; repetitions are cut to hold them, shapes are not.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Repetitions of a pass, at most.
    #[arg(long, default_value_t = 20)]
    repetitions: usize,
    /// Token counts to measure.
    #[arg(long, value_delimiter = ',', default_values_t = LENGTHS)]
    lengths: Vec<usize>,
    /// File for the result, in Markdown; it is printed in any case.
    #[arg(long)]
    out: Option<PathBuf>,
    /// File for shapes and times, in JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("device-check: {error}");
            ExitCode::from(2)
        }
    }
}

fn sizes(text: &str) -> std::result::Result<Sizes, String> {
    let numbers = text.split(',').map(|x| x.trim().parse().ok().filter(|&x| x > 0)).collect::<Option<Vec<usize>>>();
    let sizes = numbers.and_then(|numbers| numbers.try_into().ok());
    sizes.map(Sizes).ok_or_else(|| "four numbers above 0, with commas between them".into())
}

/// Checks that failed.
fn run(options: &Options) -> Result<usize> {
    let start = Instant::now();
    let said = |what: &str| eprintln!("{:5.1} s  {what}", start.elapsed().as_secs_f64());
    let mut device = CudaDevice::open(&options.driver, options.device)?;
    said(&format!("{}: compiling the PTX", device.name()));
    device.load_all()?;
    said("checking");
    let mut report = device_check::check(&mut device, &options.fixtures, options.random, options.longest)?;
    let failed = report.failures().count();
    said(&format!("{} checks, {failed} failed", report.cases.len()));
    let mut measured = Vec::new();
    if !options.check && !report.stopped {
        write_result(options, &device, &report, &measured)?;
        let budget = Budget { time: Duration::from_secs(options.seconds), repetitions: options.repetitions };
        let checked;
        (measured, checked) = device_check::measure(&mut device, &options.lengths, budget)?;
        report.cases.extend(checked);
        said("measured");
    }
    print!("{}", write_result(options, &device, &report, &measured)?);
    Ok(report.failures().count())
}

/// Also called before measuring, so that what was found is not lost with it.
fn write_result(options: &Options, device: &CudaDevice, report: &Report, measured: &[Measurement]) -> Result<String> {
    let text = device_check::markdown(device, report, measured);
    if let Some(path) = &options.out {
        write(path, &text)?;
    }
    if let Some(path) = &options.json {
        write(path, &device_check::json(measured))?;
    }
    Ok(text)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Write { path: path.into(), source })
}
