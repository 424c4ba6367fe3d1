use super::*;
use crate::sample::Position;
use tempfile::TempDir;

/// A number that no process of a test has.
const KILLED: u32 = u32::MAX;

fn state(step: usize, val_loss: Option<f64>) -> State {
    let position = Position { epoch: step / 10, taken: 3 * step };
    let settings = "[train]\nsteps = 100\n".to_string();
    State {
        step,
        position,
        seed: u64::MAX - 1,
        data: "three".to_string(),
        settings,
        val_loss,
        best_val_loss: Some(0.1 + 0.2),
    }
}

/// What stands for a model and an optimizer; a mixture of two steps would show.
fn payload(folder: &Path, step: usize) -> Result<()> {
    for file in ["config.json", "model.safetensors", OPTIMIZER_FILE] {
        fs::write(folder.join(file), format!("{file} of step {step}")).map_err(io("write", folder))?;
    }
    Ok(())
}

fn save(saves: &Saves, step: usize, val_loss: Option<f64>) -> PathBuf {
    saves.save(&state(step, val_loss), |folder| payload(folder, step)).unwrap()
}

fn open(dir: &TempDir, keep: usize) -> Saves {
    Saves::open(dir.path(), NonZeroUsize::new(keep)).unwrap()
}

fn names(saves: &Saves) -> Vec<String> {
    saves.list().unwrap().iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_string()).collect()
}

/// Everything in a folder, hidden or not, but the lock.
fn all(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.filter(|name| !name.ends_with(".lock")).collect();
    names.sort();
    names
}

fn latest_step(saves: &Saves) -> usize {
    let Latest { save, skipped } = saves.latest().unwrap().unwrap();
    assert!(skipped.is_empty(), "{skipped:?}");
    let text = fs::read_to_string(save.optimizer()).unwrap();
    assert_eq!(text, format!("{OPTIMIZER_FILE} of step {}", save.state.step));
    save.state.step
}

#[test]
fn a_checkpoint_comes_back_as_it_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 3);
    assert!(saves.latest().unwrap().is_none() && saves.best().unwrap().is_none());
    let folder = save(&saves, 50, Some(1.25));
    assert_eq!(folder, dir.path().join("step-00000050"));
    assert_eq!(Save::open(&folder).unwrap().state, state(50, Some(1.25)));
    assert_eq!(latest_step(&saves), 50);
    let json: serde_json::Value = serde_json::from_slice(&fs::read(folder.join(STATE_FILE)).unwrap()).unwrap();
    assert_eq!((&json["format_version"], &json["position"]["taken"]), (&1.into(), &150.into()));
    assert_eq!(json["files"].as_object().unwrap().len(), 3, "{json}");
    // What JSON has no number for is no loss.
    let folder = save(&saves, 51, Some(f64::NAN));
    assert_eq!(Save::open(&folder).unwrap().state, state(51, None));
    assert_eq!(saves.best().unwrap().unwrap().state.step, 50);
}

#[test]
fn the_last_ones_and_the_best_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 2);
    for (step, val_loss) in [(10, 3.0), (20, 1.0), (30, 2.0), (40, 1.0), (50, 4.0)] {
        save(&saves, step, Some(val_loss));
        let best: serde_json::Value = serde_json::from_slice(&fs::read(dir.path().join(BEST_FILE)).unwrap()).unwrap();
        assert!(dir.path().join(best["folder"].as_str().unwrap()).is_dir(), "{best}");
        if step >= 20 {
            let expected = serde_json::json!({ "folder": "step-00000020", "step": 20, "val_loss": 1.0 });
            assert_eq!(best, expected);
        }
    }
    assert_eq!(names(&saves), ["step-00000020", "step-00000040", "step-00000050"]);
    save(&saves, 60, Some(0.5));
    assert_eq!(all(dir.path()), [BEST_FILE, "step-00000050", "step-00000060"]);
    assert_eq!(saves.best().unwrap().unwrap().state.step, 60);

    let dir = tempfile::tempdir().unwrap();
    let saves = Saves::open(dir.path(), None).unwrap();
    (1..=5).for_each(|step| drop(save(&saves, step, None)));
    assert_eq!((names(&saves).len(), all(dir.path()).len()), (5, 5));
}

#[test]
fn the_newest_is_the_one_written_last() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 2);
    [100, 200].iter().for_each(|&step| drop(save(&saves, step, None)));
    // The run went on from step 100 once more.
    save(&saves, 150, None);
    assert_eq!((latest_step(&saves), names(&saves)), (150, vec!["step-00000150".into(), "step-00000200".into()]));
    save(&saves, 123_456_789, None);
    assert_eq!(
        (latest_step(&saves), names(&saves)),
        (123_456_789, vec!["step-00000150".into(), "step-123456789".into()])
    );
}

#[test]
fn the_same_step_again_replaces_the_folder_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 3);
    let folder = save(&saves, 5, Some(1.0));
    fs::write(folder.join("stale"), "of the first time").unwrap();
    save(&saves, 5, None);
    // Nothing is left of the first one, nor of its mark.
    assert_eq!(all(dir.path()), ["step-00000005"]);
    assert_eq!(all(&folder), ["config.json", "model.safetensors", "training"]);
    assert_eq!(latest_step(&saves), 5);
}

#[test]
fn damaged_checkpoints_are_told_and_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 5);
    let folders: Vec<PathBuf> = (1..=4).map(|step| save(&saves, step, Some(step as f64))).collect();
    fs::write(folders[3].join(OPTIMIZER_FILE), "short").unwrap();
    fs::remove_file(folders[3].join("config.json")).unwrap();
    fs::write(folders[2].join(STATE_FILE), "{\"format_version\": 1, ").unwrap();
    fs::remove_file(folders[0].join(STATE_FILE)).unwrap();
    let Latest { save: found, skipped } = saves.latest().unwrap().unwrap();
    assert_eq!(found.state.step, 2);
    let texts: Vec<String> = skipped.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0].contains("step-00000001 has no training/state.json, so no run can be resumed"), "{texts:?}");
    assert!(texts[1].contains("step-00000003 is damaged: training/state.json cannot be read (EOF"), "{texts:?}");
    let expected =
        "step-00000004 is damaged: config.json is absent, training/optimizer.safetensors has 5 of 40 bytes; copy";
    assert!(texts[2].contains(expected), "{texts:?}");

    fs::remove_file(folders[1].join("model.safetensors")).unwrap();
    let error = saves.latest().unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.starts_with("no checkpoint in ") && text.contains("can be used"), "{text}");
    assert!((1..=4).all(|step| text.contains(&format!("step-0000000{step}"))), "{text}");
    // What is damaged is not deleted: something of it may be of use.
    for step in 5..=9 {
        save(&saves, step, None);
    }
    assert_eq!(names(&saves).len(), 9);
}

#[test]
fn other_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 5);
    let folder = save(&saves, 1, None);
    let path = folder.join(STATE_FILE);
    let text = fs::read_to_string(&path).unwrap().replace("\"format_version\": 1", "\"format_version\": 2");
    fs::write(&path, text).unwrap();
    for error in [Save::open(&folder).unwrap_err(), saves.latest().unwrap_err()] {
        let text = error.to_string();
        assert!(error.is_usage() && text.contains("format version 2, this program reads 1"), "{text}");
    }
    let error = Save::open(&dir.path().join("absent")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.contains("absent"), "{error}");
    let error = Saves::open(dir.path(), None).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.contains("another run is writing to ") && text.contains("--out"), "{text}");
    drop(saves);
    assert!(Saves::open(dir.path(), None).unwrap_err().to_string().contains("format version 2"));
}

#[test]
fn what_could_not_be_written_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let saves = open(&dir, 3);
    let first = save(&saves, 1, Some(1.0));
    for step in [1, 2] {
        let full = |folder: &Path| {
            payload(folder, 7)?;
            let cause = std::io::Error::from(std::io::ErrorKind::StorageFull);
            Err(io("write", folder.join("model.safetensors"))(cause))
        };
        let error = saves.save(&state(step, None), full).unwrap_err();
        let text = error.to_string();
        assert!(!error.is_usage() && text.contains(&format!("step-0000000{step} was not written")), "{text}");
        assert!(
            text.contains("earlier ones are as they were: cannot write ") && text.contains("model.safet"),
            "{text}"
        );
        assert_eq!((all(dir.path()), latest_step(&saves)), (vec![BEST_FILE.into(), "step-00000001".into()], 1));
        assert_eq!(Save::open(&first).unwrap().state, state(1, Some(1.0)));
    }
    fs::write(dir.path().join("step-00000002"), "a file").unwrap();
    let error = saves.save(&state(2, None), |folder| payload(folder, 2)).unwrap_err();
    let text = error.to_string();
    assert!(error.is_usage() && text.contains("step-00000002 is there and is no checkpoint folder"), "{text}");
}

/// A folder beside its place, as a killed process left it.
fn leftover(dir: &Path, step: usize, ending: &str) -> PathBuf {
    dir.join(format!(".step-{step:08}.{KILLED}{ending}"))
}

#[test]
fn what_killed_processes_left_is_put_right() {
    let whole = |dir: &TempDir, step: usize| {
        let saves = Saves::open(dir.path(), None).unwrap();
        save(&saves, step, Some(step as f64))
    };
    // While a checkpoint was written, and while one was deleted.
    for ending in [".tmp", ".gone"] {
        let dir = tempfile::tempdir().unwrap();
        whole(&dir, 1);
        fs::create_dir(leftover(dir.path(), 2, ending)).unwrap();
        fs::write(leftover(dir.path(), 2, ending).join("config.json"), "").unwrap();
        let saves = open(&dir, 3);
        assert_eq!((all(dir.path()), latest_step(&saves)), (vec![BEST_FILE.into(), "step-00000001".into()], 1));
    }
    // While a checkpoint replaced one of the same step: before, between and after the moves.
    for killed in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let place = whole(&dir, 1);
        fs::write(place.join("which"), "old").unwrap();
        let other = tempfile::tempdir().unwrap();
        let new = whole(&other, 1);
        fs::write(new.join("which"), "new").unwrap();
        let moved = |from: &Path, to: &Path| fs::rename(from, to).unwrap();
        moved(&new, &leftover(dir.path(), 1, ".tmp"));
        if killed > 0 {
            moved(&place, &leftover(dir.path(), 1, ".old"));
        }
        if killed > 1 {
            moved(&leftover(dir.path(), 1, ".tmp"), &place);
        }
        let saves = open(&dir, 3);
        assert_eq!((all(dir.path()), latest_step(&saves)), (vec![BEST_FILE.into(), "step-00000001".into()], 1));
        let which = fs::read_to_string(place.join("which")).unwrap();
        assert_eq!(which, if killed == 0 { "old" } else { "new" }, "{killed}");
    }
    // Between the moves, and the new one is gone.
    let dir = tempfile::tempdir().unwrap();
    fs::rename(whole(&dir, 1), leftover(dir.path(), 1, ".old")).unwrap();
    assert_eq!(latest_step(&open(&dir, 3)), 1);
    // Before the best one was marked; and other files are left alone.
    let dir = tempfile::tempdir().unwrap();
    whole(&dir, 2);
    whole(&dir, 1);
    fs::write(dir.path().join(BEST_FILE), r#"{"folder": "step-00000002"}"#).unwrap();
    fs::write(dir.path().join(format!(".{BEST_FILE}.{KILLED}.tmp")), "{").unwrap();
    fs::write(dir.path().join(format!(".notes.{KILLED}.tmp")), "of the user").unwrap();
    open(&dir, 3);
    assert!(fs::read_to_string(dir.path().join(BEST_FILE)).unwrap().contains("step-00000001"));
    let expected = [&format!(".notes.{KILLED}.tmp"), BEST_FILE, "step-00000001", "step-00000002"];
    assert_eq!(all(dir.path()), expected);
}

#[test]
fn a_single_folder_is_replaced_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("out/checkpoint");
    let write =
        |step| replace(&place, |folder| fs::write(folder.join("config.json"), step).map_err(io("write", folder)));
    let read = || fs::read_to_string(place.join("config.json")).unwrap();
    write("1").unwrap();
    fs::write(place.join("stale"), "").unwrap();
    write("2").unwrap();
    assert_eq!((read(), all(&place)), ("2".to_string(), vec!["config.json".to_string()]));

    let fail = || replace(&place, |_| Err(io("write", "x")(std::io::ErrorKind::StorageFull.into())));
    let text = fail().unwrap_err().to_string();
    assert!(text.contains("checkpoint was not written") && text.contains("cannot write x"), "{text}");
    assert_eq!((read(), all(place.parent().unwrap())), ("2".to_string(), vec!["checkpoint".to_string()]));
    // Killed between the moves: there is none under the name until the next call.
    let beside = |ending: &str| place.with_file_name(format!(".checkpoint.{KILLED}{ending}"));
    fs::rename(&place, beside(".old")).unwrap();
    fs::create_dir(beside(".tmp")).unwrap();
    fs::write(beside(".tmp").join("config.json"), "3").unwrap();
    fail().unwrap_err();
    assert_eq!((read(), all(place.parent().unwrap())), ("3".to_string(), vec!["checkpoint".to_string()]));
}

#[test]
fn only_checkpoints_and_empty_folders_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let write =
        |place: &Path| replace(place, |folder| fs::write(folder.join("config.json"), "").map_err(io("write", folder)));
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    write(&empty).unwrap();

    let file = dir.path().join("file");
    fs::write(&file, "of the user").unwrap();
    let photos = dir.path().join("photos");
    fs::create_dir(&photos).unwrap();
    fs::write(photos.join("cat.png"), "of the user").unwrap();
    for place in [&file, &photos, Path::new("/")] {
        let error = write(place).unwrap_err();
        let text = error.to_string();
        assert!(error.is_usage() && text.contains("is no checkpoint folder") && text.contains("--out"), "{text}");
    }
    assert_eq!(fs::read_to_string(photos.join("cat.png")).unwrap(), "of the user");
}

#[cfg(unix)]
#[test]
fn a_link_keeps_leading_to_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let (target, link) = (dir.path().join("large-disk"), dir.path().join("checkpoint"));
    fs::create_dir(&target).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    for text in ["1", "2"] {
        replace(&link, |folder| fs::write(folder.join("config.json"), text).map_err(io("write", folder))).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(target.join("config.json")).unwrap(), text);
    }
}
