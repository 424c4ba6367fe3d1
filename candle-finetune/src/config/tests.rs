use std::path::Path;

use super::*;
use crate::error::Error;

const MISPLACED: &str = include_str!("../../tests/data/misplaced-key/config.toml");

#[test]
fn every_setting_takes_its_example_and_is_written_and_read_back() -> Result<()> {
    let mut config = Config::default();
    for setting in Config::SETTINGS {
        let before = config.clone();
        config.set(&setting.name(), setting.example)?;
        let mut by_key = before.clone();
        by_key.set(&format!("--{}", setting.key), setting.example)?;
        assert_eq!(by_key, config, "{setting:?}");
        let alone = (setting.get)(&config).unwrap_or_else(|| panic!("{setting:?} has no value"));
        let mut again = before;
        (setting.set)(&mut again, &setting::text(&alone).unwrap()).unwrap();
        assert_eq!(again, config, "{setting:?}");
    }
    let text = config.to_toml();
    let mut again = Config::default();
    again.set_toml(&text, Path::new("run.toml"))?;
    assert_eq!(again, config, "{text}");
    assert_eq!(again.to_toml(), text);
    Ok(())
}

#[test]
fn names_are_unique_and_have_sections() {
    let mut names: Vec<String> = Config::SETTINGS.iter().map(|setting| format!("--{}", setting.key)).collect();
    names.extend(Config::SETTINGS.iter().filter_map(|setting| setting.flag.map(str::to_string)));
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    let sections = file::sections();
    assert_eq!(sections, ["model", "lora", "data", "train", "optimizer", "parallel", "out"]);
}

#[test]
fn a_gpu_needs_a_build_for_it() -> Result<()> {
    let mut config = Config::default();
    config.set("--device", "cuda:1")?;
    let checked = config.validate();
    assert_eq!(checked.is_ok(), cfg!(feature = "cuda"));
    if let Err(error) = checked {
        assert!(error.to_string().contains("build it with --features cuda"), "{error}");
    }
    Ok(())
}

#[test]
fn bad_values_name_flag_value_allowed_and_an_example() {
    for (flag, value, allowed, fix) in [
        ("--cp", "two", "a whole number from 1 to 4096", "--cp 2"),
        ("--cp", "-1", "a whole number from 1 to 4096", "--cp 2"),
        ("--cp", "0", "a whole number from 1 to 4096", "--cp 2"),
        ("--cp", "4097", "a whole number from 1 to 4096", "--cp 2"),
        ("--device", "gpu", "cpu, cuda, or cuda:N", "--device cuda"),
        ("--layout", "zigzag", "contiguous, head-tail, balanced", "--layout head-tail"),
        ("--steps", "0", "a whole number of at least 1", "--steps 100"),
        ("--steps", "1.5", "a whole number of at least 1", "--steps 100"),
        ("--seed", "-3", "a whole number from 0 to 9223372036854775807", "--seed 0"),
        ("--lr", "fast", "a number above 0 and below 1", "--lr 1e-4"),
        ("--lr", "0", "a number above 0 and below 1", "--lr 1e-4"),
        ("--lr", "NaN", "a number above 0 and below 1", "--lr 1e-4"),
        ("--schedule", "cosin", "cosine, linear, constant", "--schedule cosine"),
        ("--batch-rows", "0", "a whole number from 1", "--batch-rows 2"),
        ("--seq-len", "0", "from 1 to 16777216", "--seq-len 4096"),
        ("--recompute", "maybe", "true or false", "--recompute true"),
        ("--dtype", "f16", "f32 or bf16", "--dtype bf16"),
        ("--lora-rank", "0", "a whole number from 1", "--lora-rank 16"),
        ("--lora-dropout", "1", "from 0 to below 1", "--lora-dropout 0.05"),
        ("--lora-parts", "visoin", "one or more of text, vision, audio", "--lora-parts text,vision"),
        ("--lora-targets", "q_proj,,v_proj", "one or more names", "--lora-targets q_proj,v_proj"),
        ("--validation-share", "1", "above 0 and below 1", "--validation-share 0.05"),
        ("--optimizer.beta2", "1", "from 0 to below 1", "--optimizer.beta2 0.95"),
        ("--train.max_grad_norm", "inf", "a number above 0", "--train.max_grad_norm 1.0"),
        ("--trace", "0", "a whole number of at least 1", "--trace 3"),
        ("--model", "", "a name", "--model google/gemma-4-E2B-it"),
    ] {
        let error = Config::default().set(flag, value).unwrap_err();
        assert!(error.is_usage());
        let text = error.to_string();
        let fix = format!("write for example {fix}");
        assert!(text.starts_with(&format!("{flag} {value:?}: allowed is ")), "{text}");
        assert!(text.contains(allowed) && text.ends_with(&fix), "{text}");
    }
    let error = Config { cp: 0, ..Config::default() }.validate().unwrap_err().to_string();
    assert!(error.starts_with("--cp \"0\": allowed is a whole number from 1 to 4096"), "{error}");
    let error = Config::default().set("--stpes", "3").unwrap_err().to_string();
    assert_eq!(error, "--stpes is no setting of this recipe; the nearest is --steps");
    let error = Config::default().set("--data.learning_rate", "3").unwrap_err().to_string();
    assert!(error.ends_with("the nearest is --lr"), "{error}");
    let error = Config::default().set("--wandb", "3").unwrap_err().to_string();
    assert!(error.ends_with("--help lists all of them"), "{error}");
}

#[test]
fn pairs_that_do_not_go_together_are_told_with_the_fix() {
    let model = tempfile::tempdir().unwrap();
    std::fs::write(model.path().join("config.json"), "{}").unwrap();
    let data = model.path().join("chats.jsonl");
    std::fs::write(&data, "").unwrap();
    let (model, data) = (model.path().to_str().unwrap(), data.to_str().unwrap());
    let with_model = [("--model", model)];
    let with_data = [("--model", model), ("--data", data)];
    for (given, flag, allowed, fix) in [
        (vec![("--freeze", "audio")], "--freeze", "beside --model DIR", "leave --freeze out"),
        (vec![("--lora-rank", "8")], "--lora-rank", "beside --model DIR", "leave --lora-rank out"),
        (
            and(&with_model, &[("--lora-rank", "8"), ("--freeze", "audio")]),
            "--freeze",
            "without --lora-rank",
            "--lora-parts",
        ),
        (and(&with_model, &[("--lora-alpha", "8")]), "--lora-alpha", "beside --lora-rank N", "--lora-rank 16"),
        (and(&with_model, &[("--lora-dropout", "0.5")]), "--lora-dropout", "beside --lora-rank N", "--lora-rank 16"),
        (and(&with_model, &[("--lora-targets", "q_proj")]), "--lora-targets", "beside --lora-rank N", "--lora-rank 16"),
        (and(&with_model, &[("--lora-parts", "text")]), "--lora-parts", "beside --lora-rank N", "--lora-rank 16"),
        (and(&with_model, &[("--lora-merge", "true")]), "--lora-merge", "beside --lora-rank N", "--lora-rank 16"),
        (vec![("--truncate", "true")], "--truncate", "beside --data", "leave --truncate out"),
        (vec![("--validation", "x.jsonl")], "--validation", "beside --data", "leave --validation out"),
        (vec![("--validation-share", "0.5")], "--validation-share", "beside --data", "leave --validation-share out"),
        (vec![("--validate-every", "5")], "--validate-every", "beside --data", "leave --validate-every out"),
        (vec![("--epochs", "5")], "--epochs", "beside --data", "leave --epochs out"),
        (vec![("--data", "x.jsonl")], "--data", "beside --model DIR", "leave --data out"),
        (and(&with_model, &[("--data", "absent.jsonl")]), "--data", "an existing", "check the path"),
        (and(&with_data, &[("--validation", "absent.jsonl")]), "--validation", "an existing", "check the path"),
        (
            and(&with_data, &[("--validation", with_data[1].1), ("--validation-share", "0.5")]),
            "--validation-share",
            "without --validation FILE",
            "leave one of the two out",
        ),
        (and(&with_data, &[("--validate-every", "5")]), "--validate-every", "beside --validation FILE", "held out"),
        (
            and(&with_data, &[("--steps", "5"), ("--epochs", "2")]),
            "--epochs",
            "without --steps 5",
            "leave one of the two out",
        ),
        (vec![("--steps", "5"), ("--warmup", "6")], "--warmup", "at most the number of steps, 5", "a tenth"),
        (vec![("--steps", "5"), ("--trace", "6")], "--trace", "at most the number of steps, 5", "a step of the run"),
        (vec![("--model", "no-such-folder")], "--model", "config.json", "download the checkpoint"),
        (vec![("--out", "Cargo.toml")], "--out", "a folder", "another name"),
    ] {
        let mut config = Config::default();
        for (flag, value) in &given {
            config.set(flag, value).unwrap();
        }
        let error = config.validate().unwrap_err();
        assert!(error.is_usage());
        let text = error.to_string();
        assert!(text.starts_with(&format!("{flag} \"")), "{given:?}: {text}");
        assert!(text.contains(allowed) && text.contains(fix), "{given:?}: {text}");
    }
    let mut good = Config::default();
    for (flag, value) in
        and(&with_data, &[("--lora-rank", "8"), ("--validation-share", "0.5"), ("--validate-every", "5")])
    {
        good.set(flag, value).unwrap();
    }
    good.validate().unwrap();
    assert_eq!(
        [good.rate(), Config { lora: Config::default().lora, ..good }.rate(), Config::default().rate()],
        [2e-4, 1e-4, 2e-3]
    );
}

fn and<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [base, more].concat()
}

#[test]
fn a_settings_file_is_read_over_the_defaults() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    let text = "\u{feff}[train]\r\nsteps = 1_000\nlearning_rate = 1e-5 # small\nschedule = \"linear\"\n\n[model]\n\
                freeze = [\"vision\", \"*.layers.0.*\"]\nrecompute = true\n[lora]\nparts = \"text, audio\"\n[train.x]\n";
    std::fs::write(&path, text.replace("[train.x]\n", "")).unwrap();
    let mut config = Config { cp: 7, ..Config::default() };
    config.set_file(&path)?;
    let mut expected = Config {
        cp: 7,
        steps: Some(1000),
        lr: Some(1e-5),
        schedule: ScheduleKind::Linear,
        freeze: vec!["vision".to_string(), "*.layers.0.*".to_string()],
        recompute: true,
        ..Config::default()
    };
    expected.lora.parts = vec![Part::Text, Part::Audio];
    assert_eq!(config, expected);

    std::fs::write(&path, text).unwrap();
    let error = config.set_file(&path).unwrap_err().to_string();
    assert!(error.contains("line 11: train.x is no setting"), "{error}");
    let absent = config.set_file(&dir.path().join("absent.toml")).unwrap_err().to_string();
    assert!(absent.contains("absent.toml\": allowed is an existing file of settings in TOML"), "{absent}");
    std::fs::write(&path, b"[train]\nsteps = 3 # \xff\n").unwrap();
    let error = config.set_file(&path).unwrap_err().to_string();
    assert!(error.contains("line 2: this is not UTF-8"), "{error}");
    Ok(())
}

#[test]
fn all_faults_of_a_settings_file_come_in_one_report_with_the_right_name_and_section() {
    let faults = |text: &str| {
        let mut config = Config::default();
        let error = config.set_toml(text, Path::new("run.toml")).unwrap_err();
        assert_eq!(config, Config::default(), "nothing is set");
        assert!(error.is_usage());
        let text = error.to_string();
        assert!(text.starts_with("run.toml: ") && text.contains("nothing was trained"), "{text}");
        match error {
            Error::Settings { faults, .. } => faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
            other => panic!("{other}"),
        }
    };
    let found = faults(MISPLACED);
    assert_eq!(
        found,
        [
            "line 5: data.learning_rate is no setting; the nearest is learning_rate in [train]",
            "line 7: train.stpes is no setting; the nearest is steps in [train]",
        ]
    );
    for (text, expected) in [
        ("seed = 3", "line 1: seed is no setting; the nearest is seed in [train]"),
        (
            "[trian]\nsteps = 3",
            "line 1: [trian] is no section; the sections are model, lora, data, train, optimizer, parallel, out",
        ),
        (
            "[train]\nsteps = \"many\"",
            "line 2: train.steps = \"many\": allowed is a whole number of at least 1; write for example steps = 100 in [train]",
        ),
        (
            "[train]\nsteps = 2024-01-01",
            "line 2: train.steps = 2024-01-01: a date is no value of it; write for example steps = 100 in [train]",
        ),
        (
            "[model]\nfreeze = [1]",
            "line 2: model.freeze = [1]: a list is no value of it; write for example freeze = [\"vision\", \"audio\"] in [model]",
        ),
        (
            "[model]\npath = 5",
            "line 2: model.path = 5: a number is no value of it; write for example path = \"google/gemma-4-E2B-it\" in [model]",
        ),
        (
            "[train]\nschedule = true",
            "line 2: train.schedule = true: true or false is no value of it; write for example ",
        ),
        ("[lora]\nrank = 99999999999999999999", "line 2: "),
        ("[train]\nzzzz = 1", "line 2: train.zzzz is no setting; --help lists all of them"),
        ("[parallel]\nlr = 1", "line 2: parallel.lr is no setting; the nearest is learning_rate in [train]"),
    ] {
        let found = faults(text);
        assert!(found.len() == 1 && found[0].starts_with(expected), "{found:?}");
    }
    let broken = faults("[train]\nsteps = = 3");
    assert!(broken[0].starts_with("line 2: "), "{broken:?}");
    let twice = faults("[train]\nsteps = 3\nsteps = 4");
    assert!(twice[0].starts_with("line 3: duplicate key"), "{twice:?}");
}

#[test]
fn the_reference_in_the_readme_is_complete() {
    let row = |setting: &Setting| {
        let flag = setting.flag.map_or(String::new(), |flag| format!("`{flag}`"));
        format!("| `{}` | {flag} | {} |\n", setting.key, setting.help.replace('|', "\\|"))
    };
    let table: String = Config::SETTINGS.iter().map(row).collect();
    let readme = include_str!("../../README.md");
    assert!(
        readme.contains(&table),
        "candle-finetune/README.md should have\n| key | flag | what |\n| --- | --- | --- |\n{table}"
    );
}
