//! Processes that are killed while they save, and disks that are full: what was complete stays and opens.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor, Var};
use candle_finetune::family::{Family, VlmConfig};
use candle_finetune::saves::{CHECKPOINTS_FOLDER, Latest, OPTIMIZER_FILE, Save, Saves, State, replace};
use candle_finetune::{AdamW, AdamWConfig, Error, Gradients, Position, Result, small_model};
use candle_gemma4::Weights;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Where a child finds its folder.
const FOLDER: &str = "SAVES_TEST_FOLDER";
const KILLS: usize = 20;
/// Long enough to come to any moment of a save; the result does not depend on it.
const MOST_MILLISECONDS: u64 = 150;

/// With these settings a step at rate -1 adds exactly 1 to every weight, whatever the gradient; the means are the
/// gradient and its square.
const SETTINGS: AdamWConfig = AdamWConfig { beta1: 0.0, beta2: 0.0, eps: 0.0, weight_decay: 0.0 };

/// A run all of whose numbers tell the step: weights are the step, the gradients' means too, their squares its square.
struct Run {
    model: Arc<dyn VlmConfig>,
    weights: Weights,
    optimizer: AdamW,
}

impl Run {
    fn new() -> Self {
        let model = small_model::config(Family::Gemma4).unwrap();
        let weights = Weights::random(model.as_ref(), DType::F32, &Device::Cpu, 0).unwrap();
        for var in weights.variables().values() {
            var.set(&var.zeros_like().unwrap()).unwrap();
        }
        let optimizer = AdamW::new(weights.variables(), SETTINGS).unwrap();
        Self { model, weights, optimizer }
    }

    fn resume(save: &Save) -> Self {
        let model = Family::read(&save.folder).unwrap();
        let weights = Weights::load(&save.folder, model.as_ref(), DType::F32, &Device::Cpu).unwrap();
        let optimizer = AdamW::load(weights.variables(), SETTINGS, &save.optimizer()).unwrap();
        Self { model, weights, optimizer }
    }

    fn step(&mut self) {
        let step = self.optimizer.steps() as f64 + 1.0;
        let gradient = |var: &Var| Tensor::full(step as f32, var.shape(), &Device::Cpu).unwrap();
        let named = self.weights.variables().iter().map(|(name, var)| (name.clone(), gradient(var)));
        self.optimizer.step(&Gradients::from_named(named.collect()), -1.0).unwrap();
    }

    fn state(&self) -> State {
        let step = self.optimizer.steps();
        let position = Position { epoch: 0, taken: 2 * step };
        // The best one is never the newest and changes now and then.
        let val_loss = Some(((step * 7) % 11) as f64 + 1.0 / step as f64);
        State {
            step,
            position,
            seed: 3,
            data: String::new(),
            settings: format!("step {step}"),
            val_loss,
            best_val_loss: val_loss,
        }
    }

    fn save(&self, saves: &Saves) -> Result<PathBuf> {
        saves.save(&self.state(), |folder| {
            self.weights.save(folder, self.model.as_ref())?;
            self.optimizer.save(&folder.join(OPTIMIZER_FILE))
        })
    }

    fn save_model(&self, folder: &Path) -> Result<()> {
        replace(folder, |folder| Ok(self.weights.save(folder, self.model.as_ref())?))
    }

    /// Everything is of this step, and nothing of another.
    fn check(&self, step: usize) {
        let all = |tensor: &Tensor, number: f64| {
            let numbers = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(numbers.iter().all(|&found| f64::from(found) == number), "{:?}, not {number}", numbers.first());
        };
        assert_eq!(self.optimizer.steps(), step);
        self.weights.variables().values().for_each(|var| all(var, step as f64));
        for (_, moments) in self.optimizer.moments() {
            all(&moments.mean, step as f64);
            all(&moments.square, (step * step) as f64);
        }
    }
}

fn open(out: &Path) -> Saves {
    Saves::open(out.join(CHECKPOINTS_FOLDER), NonZeroUsize::new(2)).unwrap()
}

/// This test binary once more, for one of the ignored tests.
fn child(name: &str, out: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]).env(FOLDER, out);
    command
}

#[test]
#[ignore = "the child of the test that kills it"]
fn saves_without_end() {
    let Some(out) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    println!("\nopens");
    let saves = open(&out);
    let mut run = match saves.latest().unwrap() {
        Some(Latest { save, .. }) => Run::resume(&save),
        None => Run::new(),
    };
    loop {
        run.step();
        run.save(&saves).unwrap();
        println!("\nsaved {}", run.optimizer.steps());
        run.save_model(&out.join("checkpoint")).unwrap();
    }
}

/// Kills a process that saves without end, some time after it has told so many saves; returns the last step of them.
fn kill_after(saves: usize, time: Duration, out: &Path) -> Option<usize> {
    let mut process = child("saves_without_end", out).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(process.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("\nopens\n") || text.matches("\nsaved ").count() < saves {
        assert!(output.read_line(&mut text).unwrap() > 0, "the child ended by itself: {text}");
    }
    std::thread::sleep(time);
    // On Unix this is SIGKILL.
    process.kill().unwrap();
    let status = process.wait().unwrap();
    assert!(status.code().is_none(), "the child ended by itself: {status}");
    output.read_to_string(&mut text).unwrap();
    text.lines().filter_map(|line| line.strip_prefix("saved ")?.parse().ok()).next_back()
}

#[cfg(unix)]
#[test]
fn whenever_a_run_is_killed_its_folders_open() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    let mut rng = StdRng::seed_from_u64(20);
    let (mut last, mut least) = (0, 0);
    for kill in 0..KILLS {
        let awaited = rng.random_range(0..2);
        let told = kill_after(awaited, Duration::from_millis(rng.random_range(0..MOST_MILLISECONDS)), out);
        least += awaited;

        let saves = open(out);
        let Some(Latest { save, skipped }) = saves.latest().unwrap() else {
            assert_eq!((told, last), (None, 0), "kill {kill}: all is lost");
            continue;
        };
        assert!(skipped.is_empty(), "kill {kill}: {skipped:?}");
        let step = save.state.step;
        assert!(step >= last.max(told.unwrap_or(0)), "kill {kill}: step {step} after {last} and {told:?}");
        last = step;
        let run = Run::resume(&save);
        run.check(step);
        assert_eq!(save.state, run.state());
        for folder in saves.list().unwrap() {
            let save = Save::open(&folder).unwrap();
            Run::resume(&save).check(save.state.step);
        }
        let best: serde_json::Value =
            serde_json::from_slice(&fs::read(out.join(CHECKPOINTS_FOLDER).join("best.json")).unwrap()).unwrap();
        assert_eq!(best["step"], saves.best().unwrap().unwrap().state.step);
        check_model(&out.join("checkpoint"), step);
    }
    assert!(last >= least && least > KILLS / 4, "{last} checkpoints were written, not {least}");
}

/// The final folder is of one step, or it is on its way, complete beside its place.
fn check_model(folder: &Path, last: usize) {
    // A call that writes nothing puts right what the killed process left.
    let nothing = Error::Task { task: "this test", reason: "it writes nothing".to_string() };
    replace(folder, |_| Err(nothing)).unwrap_err();
    if !folder.exists() {
        assert!(last <= 1);
        return;
    }
    let model = Family::read(folder).unwrap();
    let weights = Weights::load(folder, model.as_ref(), DType::F32, &Device::Cpu).unwrap();
    let mut numbers = Vec::new();
    for var in weights.variables().values() {
        numbers.extend(var.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }
    assert!(numbers.iter().all(|number| *number == numbers[0]), "a mixture of steps");
    assert!((1..=last).contains(&(numbers[0] as usize)), "{} after {last}", numbers[0]);
}

#[test]
#[ignore = "the child of the test that limits the size of its files"]
fn saves_on_a_full_disk() {
    let Some(out) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let saves = open(&out);
    let Latest { save, .. } = saves.latest().unwrap().unwrap();
    let mut run = Run::resume(&save);
    run.step();
    let error = run.save(&saves).unwrap_err();
    let text = error.to_string();
    assert!(!error.is_usage() && text.contains("step-00000002 was not written"), "{text}");
    assert!(text.contains("File too large"), "{text}");
    let error = run.save_model(&out.join("checkpoint")).unwrap_err();
    assert!(error.to_string().contains("checkpoint was not written"), "{error}");
    println!("\nrefused");
}

#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing_that_was_complete() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    let mut run = Run::new();
    run.step();
    run.save(&open(out)).unwrap();
    run.save_model(&out.join("checkpoint")).unwrap();

    // Files of more than some kilobytes fail as on a full disk; the signal that comes with it is ignored.
    let limited = child("saves_on_a_full_disk", out);
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\""]).arg(limited.get_program());
    let output = shell.args(limited.get_args()).env(FOLDER, out).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("\nrefused\n"), "{text}");

    let saves = open(out);
    assert_eq!(saves.list().unwrap().len(), 1);
    let names = fs::read_dir(out.join(CHECKPOINTS_FOLDER)).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [".lock", "best.json", "step-00000001"]);
    let Latest { save, .. } = saves.latest().unwrap().unwrap();
    Run::resume(&save).check(1);
    check_model(&out.join("checkpoint"), 1);
}
