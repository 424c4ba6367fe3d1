//! Which files of a repository or folder are the data that was asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Ends of names of files that can be read.
const READ: [&str; 3] = [".jsonl", ".ndjson", ".parquet"];
/// The split if none is named.
const DEFAULT_SPLIT: &str = "train";
/// Words in names of files and folders that tell a split, and the split.
const WORDS: [(&str, &str); 10] = [
    ("train", "train"),
    ("training", "train"),
    ("validation", "validation"),
    ("valid", "validation"),
    ("val", "validation"),
    ("dev", "validation"),
    ("test", "test"),
    ("testing", "test"),
    ("eval", "test"),
    ("evaluation", "test"),
];
/// Stands before the part of a message that only a data set of the Hub has: what to write behind its name.
pub(super) const HINT: &str = "; name what is meant, such as :";
/// Names that a message shows; the rest is counted.
const SHOWN: usize = 8;

/// A file that can be read, and what its name tells.
#[derive(Debug)]
struct Candidate<'a> {
    path: &'a str,
    /// Folder below the one that is looked at, without `data` and without a folder that names the split.
    folder: String,
    split: Option<String>,
}

/// The files that `selector` (a split, a folder, a folder and a split, or a file) stands for, in order of their names; the
/// split `train` of the one folder if it is `None`. The error continues a sentence that begins with the source's name.
///
/// Splits are told by names as on the Hub: `train-00000-of-00003.parquet`, `train.jsonl`, `data/train.jsonl`,
/// `train/a.jsonl`. If no name tells one, all files are `train`.
pub(super) fn pick(listed: &[&str], selector: Option<&str>) -> Result<Vec<String>, String> {
    let readable: Vec<&str> = listed.iter().copied().filter(|path| is_safe(path) && is_read(path)).collect();
    let (folder, split) = match selector.map(|selector| selector.trim_end_matches('/')) {
        None => ("", None),
        Some(file) if listed.contains(&file) && is_safe(file) => {
            return match is_read(file) || file.ends_with(".json") {
                true => Ok(vec![file.to_string()]),
                false => Err(format!("has {file:?}, but that is no file that can be read: .jsonl or .parquet")),
            };
        }
        Some(folder)
            if listed.iter().any(|path| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))) =>
        {
            (folder, None)
        }
        Some(selector) => {
            selector.rsplit_once('/').map_or(("", Some(selector)), |(folder, split)| (folder, Some(split)))
        }
    };
    if readable.is_empty() {
        return Err(format!("has no data that can be read, which is .jsonl or .parquet; it has {}", shown(listed)));
    }
    let candidates = in_one_folder(readable.iter().filter_map(|path| candidate(path, folder)).collect(), folder)?;
    let mut chosen = of_split(candidates, split, folder)?;
    chosen.sort_unstable();
    one_format(&chosen)?;
    whole_sets(&chosen)?;
    Ok(chosen.into_iter().map(str::to_string).collect())
}

fn candidate<'a>(path: &'a str, folder: &str) -> Option<Candidate<'a>> {
    let rest = match folder {
        "" => path,
        _ => path.strip_prefix(folder)?.strip_prefix('/')?,
    };
    let (above, name) = rest.rsplit_once('/').unwrap_or(("", rest));
    let mut above: Vec<&str> = above.split('/').filter(|part| !part.is_empty()).collect();
    let mut split = split_of_name(name);
    if let Some(named) = above.last().and_then(|part| word(part)) {
        above.pop();
        split = split.or(Some(named.to_string()));
    }
    above.retain(|part| *part != "data");
    Some(Candidate { path, folder: above.join("/"), split })
}

/// The candidates directly in the folder; if there are none, those of the one folder in it.
fn in_one_folder<'a>(candidates: Vec<Candidate<'a>>, folder: &str) -> Result<Vec<Candidate<'a>>, String> {
    let folders: BTreeSet<&str> = candidates.iter().map(|candidate| candidate.folder.as_str()).collect();
    let chosen = match folders.iter().copied().collect::<Vec<&str>>()[..] {
        [] => return Err(format!("has no .jsonl or .parquet file in {folder:?}")),
        ["", ..] => String::new(),
        [only] => only.to_string(),
        _ => {
            let folders: Vec<&str> = folders.into_iter().collect();
            return Err(format!(
                "has data in several folders: {}{HINT}{}",
                shown(&folders),
                [folder, folders[0]].join("/").trim_start_matches('/')
            ));
        }
    };
    Ok(candidates.into_iter().filter(|candidate| candidate.folder == chosen).collect())
}

fn of_split<'a>(candidates: Vec<Candidate<'a>>, asked: Option<&str>, folder: &str) -> Result<Vec<&'a str>, String> {
    let splits: BTreeSet<&str> = candidates.iter().filter_map(|candidate| candidate.split.as_deref()).collect();
    let wanted = match asked {
        Some(split) => known(split),
        // A single name that is no usual one is the name of the whole.
        None => splits
            .iter()
            .find(|split| splits.len() == 1 && word_in(split).is_none())
            .map_or(DEFAULT_SPLIT, |s| s)
            .into(),
    };
    if splits.is_empty() && wanted == DEFAULT_SPLIT {
        return Ok(candidates.iter().map(|candidate| candidate.path).collect());
    }
    let chosen: Vec<&str> =
        candidates.iter().filter(|found| found.split.as_ref() == Some(&wanted)).map(|found| found.path).collect();
    match chosen.is_empty() {
        false => Ok(chosen),
        true => {
            let place = if folder.is_empty() { String::new() } else { format!(" in {folder:?}") };
            let asked = asked.unwrap_or(DEFAULT_SPLIT);
            Err(match splits.is_empty() {
                true => {
                    let paths: Vec<&str> = candidates.iter().map(|candidate| candidate.path).collect();
                    format!(
                        "has no split, folder or file {asked:?}{place}; no name of its files tells a split: {}",
                        shown(&paths)
                    )
                }
                false => {
                    let splits: Vec<&str> = splits.into_iter().collect();
                    let example = [folder, splits[0]].join("/");
                    let example = example.trim_start_matches('/');
                    format!("has no split {asked:?}{place}; it has {}{HINT}{example}", shown(&splits))
                }
            })
        }
    }
}

/// The same samples often stand in a repository twice, once in each format.
fn one_format(chosen: &[&str]) -> Result<(), String> {
    let parquet = |path: &&&str| path.ends_with(".parquet");
    match (chosen.iter().find(parquet), chosen.iter().find(|path| !parquet(path))) {
        (Some(table), Some(text)) => Err(format!("has the split in two formats, {text} and {table}{HINT}{text}")),
        _ => Ok(()),
    }
}

/// Names like `train-00000-of-00003` tell how many there are.
fn whole_sets(chosen: &[&str]) -> Result<(), String> {
    let mut sets: BTreeMap<(&str, usize), BTreeSet<usize>> = BTreeMap::new();
    for path in chosen {
        if let Some((start, number, count)) = shard(path) {
            sets.entry((start, count)).or_default().insert(number);
        }
    }
    for ((start, count), numbers) in sets {
        if let Some(missing) = (0..count).find(|number| !numbers.contains(number)) {
            return Err(format!("lacks {start}-{missing:05}-of-{count:05}, one of the {count} files of a set"));
        }
    }
    Ok(())
}

/// `data/train-00001-of-00003-abc.parquet` as `data/train`, 1 and 3.
fn shard(path: &str) -> Option<(&str, usize, usize)> {
    let (at, _) = path.match_indices("-of-").last()?;
    let number = path.get(at.checked_sub(5)?..at)?;
    let count = path.get(at + 4..at + 9)?;
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    let start = path.get(..at - 5)?.strip_suffix('-')?;
    Some((start, digits(number)?, digits(count)?))
}

fn split_of_name(name: &str) -> Option<String> {
    if let Some((start, ..)) = shard(name)
        && !start.is_empty()
        && start.chars().all(|sign| sign.is_ascii_alphanumeric() || matches!(sign, '_' | '.'))
    {
        return Some(known(start));
    }
    word_in(name).map(str::to_string)
}

/// The split that a word of a name tells.
fn word_in(name: &str) -> Option<&'static str> {
    name.split(|sign: char| matches!(sign, '-' | '.' | '_' | ' ') || sign.is_ascii_digit()).find_map(word)
}

fn word(text: &str) -> Option<&'static str> {
    WORDS.iter().find(|(word, _)| text.eq_ignore_ascii_case(word)).map(|(_, split)| *split)
}

/// A split under its usual name.
fn known(split: &str) -> String {
    word(split).unwrap_or(split).to_string()
}

fn is_read(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    READ.iter().any(|end| path.ends_with(end))
}

/// Whether a path of a list stays in its folder, and is not hidden.
pub(super) fn is_safe(path: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.');
    !path.chars().any(|sign| sign.is_control() || matches!(sign, '\\' | ':')) && path.split('/').all(plain)
}

fn shown(names: &[&str]) -> String {
    let mut text = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => text += "no file at all",
        count if count > SHOWN => text += &format!(" and {} more", count - SHOWN),
        _ => {}
    }
    text
}

/// All files below a folder, as paths in it with `/`. Hidden ones, and what cannot be read, are not listed.
pub(super) fn files_below(folder: &Path) -> Vec<String> {
    fn visit(folder: &Path, start: &str, files: &mut Vec<String>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{start}{name}");
            match entry.path().metadata() {
                // A link to a folder may lead back up.
                Ok(found) if found.is_dir() && !entry.path().is_symlink() => {
                    visit(&entry.path(), &format!("{path}/"), files);
                }
                Ok(found) if found.is_file() => files.push(path),
                _ => {}
            }
        }
    }
    let mut files = Vec::new();
    visit(folder, "", &mut files);
    files.sort();
    files
}

/// The pictures that lines of a JSONL file name by relative paths, as paths in the repository that has the file as `file`.
/// Lines that cannot be read name none here; they are reported when all lines are checked.
pub(super) fn pictures(text: &[u8], file: &str) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for line in text.split(|&byte| byte == b'\n') {
        let Ok(line) = serde_json::from_slice::<serde_json::Value>(line) else { continue };
        let mut add = |value: &serde_json::Value| {
            if let Some(path) = value.as_str().and_then(|text| beside(text, file)) {
                named.insert(path);
            }
        };
        match &line["images"] {
            serde_json::Value::Array(images) => images.iter().for_each(&mut add),
            one => add(one),
        }
        let messages = line["messages"].as_array().into_iter().flatten();
        for part in messages.filter_map(|message| message["content"].as_array()).flatten() {
            let url = &part["image_url"];
            [&part["image"], &part["url"], &part["path"], url, &url["url"]].into_iter().for_each(&mut add);
        }
    }
    named
}

/// A relative path beside a file, as a path in the repository; `None` if it is no path or leads out.
fn beside(text: &str, file: &str) -> Option<String> {
    let candle_vlm_processor::PictureSource::Path(path) = candle_vlm_processor::PictureSource::from_text(text) else {
        return None;
    };
    let mut whole: Vec<String> = file.split('/').map(str::to_string).collect();
    whole.pop();
    for part in path.components() {
        match part {
            std::path::Component::Normal(part) => whole.push(part.to_str()?.to_string()),
            std::path::Component::CurDir => {}
            std::path::Component::ParentDir => drop(whole.pop()?),
            _ => return None,
        }
    }
    Some(whole.join("/"))
}

/// What keeps picked files from being whole in a folder that has some files of a repository; `None` if nothing does.
pub(super) fn incomplete(folder: &Path, picked: &[String], listed: &[&str]) -> Option<String> {
    let missing = |file: &String| !folder.join(file).is_file();
    let told = |file: &String| format!("{file} is missing");
    picked.iter().find(|file| missing(file)).map(told).or_else(|| {
        let texts = picked.iter().filter(|file| !file.ends_with(".parquet"));
        texts.filter_map(|file| Some(pictures(&std::fs::read(folder.join(file)).ok()?, file))).find_map(|pictures| {
            pictures.iter().find(|file| listed.contains(&file.as_str()) && missing(file)).map(told)
        })
    })
}

/// Picked files as paths.
pub(super) fn in_folder(folder: &Path, picked: &[String]) -> Vec<PathBuf> {
    picked.iter().map(|file| folder.join(file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_layouts() {
        for (listed, selector, expected) in [
            (
                &[
                    "README.md",
                    "data/test-00000-of-00001.parquet",
                    "data/train-00001-of-00002-ab.parquet",
                    "data/train-00000-of-00002-cd.parquet",
                ][..],
                None,
                &["data/train-00000-of-00002-cd.parquet", "data/train-00001-of-00002-ab.parquet"][..],
            ),
            (&["train.jsonl", "test.jsonl", "train.csv"], None, &["train.jsonl"]),
            (&["train.jsonl", "dev.jsonl"], Some("validation"), &["dev.jsonl"]),
            (&["train.jsonl", "validation.jsonl"], Some("val"), &["validation.jsonl"]),
            (&["data/train.jsonl", "data/img/a.png"], Some("train"), &["data/train.jsonl"]),
            (&["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], None, &["train/a.jsonl", "train/b.jsonl"]),
            (&["b.jsonl", "a.ndjson", "x.png"], None, &["a.ndjson", "b.jsonl"]),
            (&["b.jsonl", "a.jsonl"], Some("b.jsonl"), &["b.jsonl"]),
            (&["x.json"], Some("x.json"), &["x.json"]),
            (
                &["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"],
                Some("test"),
                &["main/test-00000-of-00001.parquet"],
            ),
            (
                &["ai2d/train-0.parquet", "ocr/train-0.parquet", "ocr/test-0.parquet"],
                Some("ocr"),
                &["ocr/train-0.parquet"],
            ),
            (
                &["ai2d/train-0.parquet", "ocr/train-0.parquet", "ocr/test-0.parquet"],
                Some("ocr/test"),
                &["ocr/test-0.parquet"],
            ),
            (&["train.jsonl", "data/train-0.parquet"], Some("data"), &["data/train-0.parquet"]),
            (
                &["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"],
                Some("train_sft"),
                &["data/train_sft-00000-of-00001.parquet"],
            ),
            (&["part-00000-of-00001.parquet"], None, &["part-00000-of-00001.parquet"]),
        ] {
            let picked = pick(listed, selector);
            assert_eq!(picked, Ok(expected.iter().map(ToString::to_string).collect()), "{listed:?} {selector:?}");
        }
    }

    #[test]
    fn what_cannot_be_picked_is_told_with_what_there_is() {
        for (listed, selector, parts) in [
            (
                &["train.csv", "README.md"][..],
                None,
                &["no data that can be read", ".jsonl or .parquet", "train.csv, README.md"][..],
            ),
            (&[], None, &["no file at all"]),
            (&["train.csv", "a.jsonl"], Some("train.csv"), &["\"train.csv\", but that is no file that can be read"]),
            (
                &["train.jsonl", "test.jsonl"],
                Some("dev"),
                &["no split \"dev\"; it has test, train; name what is meant, such as :test"],
            ),
            (&["test.jsonl"], None, &["no split \"train\"; it has test; name what is meant, such as :test"]),
            (
                &["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"],
                None,
                &["no split \"train\"; it has test_sft, train_sft"],
            ),
            (&["a.jsonl", "b.jsonl"], Some("test"), &["no split, folder or file \"test\"", "a.jsonl, b.jsonl"]),
            (
                &["ai2d/train-0.parquet", "ocr/train-0.parquet"],
                None,
                &["several folders: ai2d, ocr; name what is meant, such as :ai2d"],
            ),
            (&["x/ai2d/train.jsonl", "x/ocr/train.jsonl"], Some("x"), &["such as :x/ai2d"]),
            (
                &["ocr/train.jsonl", "b/x.csv"],
                Some("ocr/dev"),
                &["no split \"dev\" in \"ocr\"; it has train; name what is meant, such as :ocr/train"],
            ),
            (&["b/x.csv", "a.jsonl"], Some("b"), &["no .jsonl or .parquet file in \"b\""]),
            (
                &["train.jsonl", "data/train-0.parquet"],
                None,
                &["two formats, train.jsonl and data/train-0.parquet", ":train.jsonl"],
            ),
            (
                &["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
                None,
                &["lacks train-00001-of-00003, one of the 3 files of a set"],
            ),
            (
                &["../train.jsonl", ".hidden.jsonl", "/train.jsonl", "a//train.jsonl", "c:train.jsonl"],
                None,
                &["no data that can be read"],
            ),
        ] {
            let reason = pick(listed, selector).unwrap_err();
            assert!(parts.iter().all(|part| reason.contains(part)), "{listed:?} {selector:?}: {reason}");
        }
    }

    #[test]
    fn pictures_of_lines_are_found_and_never_lead_out() {
        let text = br#"{"images": ["a.png", "../img/b.png", "../../x.png", "/etc/x", "https://x.org/y.png", 7]}
no JSON
{"images": "one.png"}
{"messages": [{"role": "user", "content": [{"type": "image", "image": "./c.png"}, {"type": "image_url", "image_url": {"url": "d.png"}},
{"messages": [{"role": "user", "content": [{"type": "image", "path": "c.png"}, {"type": "image_url", "image_url": {"url": "d.png"}}]}, {"content": "text"}]}
"#;
        let found = pictures(text, "data/train.jsonl");
        let expected = ["data/a.png", "img/b.png", "data/one.png", "data/c.png", "data/d.png"];
        assert_eq!(found, expected.iter().map(ToString::to_string).collect());
    }
}
