//! Event files: against one written by TensorBoard itself, and through a reader that knows only the format's rules.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use candle_cp::comm::Traffic;
use candle_finetune::{CommUse, EventFile, Memory, OperationUse, StepReport, ValidationReport};

fn at(seconds: f64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs_f64(seconds)
}

fn step_report(step: usize) -> StepReport {
    let returned = OperationUse { bytes_sent: 1 << 29, waited_s: 0.125, waited_max_s: 0.375 };
    let operations = [(Traffic::KeyValueGradient, returned)].into_iter().collect();
    StepReport {
        step,
        epoch: Some(0.5 * step as f64),
        loss: 2.5 / step as f64,
        grad_norm: 0.1,
        lr: 1e-5,
        tokens: 100,
        label_tokens: 10,
        tokens_per_s: 50.0,
        comm: CommUse { bytes_sent: 3 << 29, waited_s: 0.25, waited_max_s: 0.5, operations },
        memory: Memory { memory_bytes: Some(1 << 30), peak_memory_bytes: Some(5 << 28) },
        seconds: 2.0,
    }
}

#[test]
fn the_bytes_are_those_of_tensorboards_writer() {
    let begin = 1_700_000_000.25;
    let dir = tempfile::tempdir().unwrap();
    let mut events = EventFile::create(dir.path(), at(begin), 300).unwrap();
    let first = [("train/loss", 2.5), ("train/lr", 1e-5), ("größe/π", -0.0)];
    events.scalars(at(begin + 0.5), 301, &first).unwrap();
    let long = "x".repeat(300);
    // A number that f32 has to round, beside those that are none.
    let odd = [("nan", f64::NAN), ("inf", f64::NEG_INFINITY), (long.as_str(), 16_777_217.0)];
    events.scalars(at(begin + 86400.0), 5_000_000_000, &odd).unwrap();
    events.scalars(UNIX_EPOCH, 0, &[("val/loss", 0.0)]).unwrap();
    let golden = include_bytes!("data/tensorboard/golden.tfevents");
    assert_eq!(fs::read(events.path()).unwrap(), golden);
}

#[test]
fn a_step_and_a_validation_are_scalars_by_tag() {
    let dir = tempfile::tempdir().unwrap();
    let mut events = EventFile::create(dir.path(), at(1000.0), 0).unwrap();
    events.step(at(1001.5), &step_report(1)).unwrap();
    let bare = StepReport { epoch: None, memory: Memory::default(), ..step_report(2) };
    events.step(at(1002.0), &bare).unwrap();
    let validation = ValidationReport { step: 2, epoch: None, val_loss: 1.25, val_tokens: 4, seconds: 1.0 };
    events.validation(at(1003.0), &validation).unwrap();

    let events = read(events.path());
    assert_eq!(events[0], Event { time: 1000.0, version: Some("brain.Event:2".to_string()), ..Event::default() });
    assert_eq!(events[1], Event { time: 1000.0, session: Some(1), ..Event::default() });
    let mut scalars = [
        ("train/loss", 2.5f32),
        ("train/grad_norm", 0.1),
        ("train/lr", 1e-5),
        ("train/epoch", 0.5),
        ("train/tokens", 100.0),
        ("train/label_tokens", 10.0),
        ("train/tokens_per_s", 50.0),
        ("memory/now_gib", 1.0),
        ("memory/peak_gib", 1.25),
        ("ranks/sent_gib", 1.5),
        ("ranks/waited_s", 0.25),
        ("ranks/waited_max_s", 0.5),
        ("ranks/key_value_gradient/sent_gib", 0.5),
        ("ranks/key_value_gradient/waited_s", 0.125),
        ("ranks/key_value_gradient/waited_max_s", 0.375),
    ]
    .map(|(tag, value)| (tag.to_string(), value))
    .to_vec();
    assert_eq!(events[2], Event { time: 1001.5, step: 1, scalars: scalars.clone(), ..Event::default() });
    scalars.retain(|(tag, _)| tag != "train/epoch" && !tag.starts_with("memory/"));
    scalars[0].1 = 1.25;
    assert_eq!(events[3], Event { time: 1002.0, step: 2, scalars, ..Event::default() });
    let validation = vec![("val/loss".to_string(), 1.25)];
    assert_eq!(events[4], Event { time: 1003.0, step: 2, scalars: validation, ..Event::default() });
    assert_eq!(events.len(), 5);
}

#[test]
fn a_resumed_run_goes_on_in_a_later_file() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("run/tensorboard");
    // Two starts within one second, then a later one.
    let starts = [(1_700_000_000.0, 0), (1_700_000_000.5, 3), (1_700_000_001.0, 7)];
    for (time, done) in starts {
        let mut events = EventFile::create(&folder, at(time), done).unwrap();
        events.step(at(time), &step_report(done + 1)).unwrap();
    }
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
    let expected =
        ["1700000000.candle-finetune.000", "1700000000.candle-finetune.001", "1700000001.candle-finetune.000"];
    assert_eq!(names, expected.map(|end| format!("events.out.tfevents.{end}")));
    // All files as one run, by TensorBoard's rule: a start forgets what was said of its step and later ones.
    let mut kept = BTreeMap::new();
    for event in files.iter().flat_map(|file| read(file)) {
        match event.session {
            Some(_) => kept.retain(|step, _| *step < event.step),
            None if event.scalars.is_empty() => {}
            None => assert_eq!(kept.insert(event.step, event.time), None, "step {} is said twice", event.step),
        }
    }
    assert_eq!(kept.into_keys().collect::<Vec<_>>(), [1, 4, 8]);
    let first_steps: Vec<u64> = files.iter().map(|file| read(file)[1].step).collect();
    assert_eq!(first_steps, [0, 4, 8]);
}

#[test]
fn a_folder_that_cannot_be_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tensorboard");
    fs::write(&file, "").unwrap();
    let told = EventFile::create(&file, at(0.0), 0).unwrap_err().to_string();
    assert!(told.starts_with("cannot create") && told.contains("tensorboard"), "{told}");
}

/// What the tests look at in an event.
#[derive(Debug, Clone, PartialEq, Default)]
struct Event {
    time: f64,
    step: u64,
    version: Option<String>,
    session: Option<u64>,
    scalars: Vec<(String, f32)>,
}

/// All events of a file, its checksums proved.
fn read(path: &Path) -> Vec<Event> {
    let file = fs::read(path).unwrap();
    let (mut events, mut rest) = (Vec::new(), file.as_slice());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(rest[8..12], masked(&rest[..8]), "checksum of a length");
        let data = &rest[12..12 + length];
        assert_eq!(rest[12 + length..16 + length], masked(data), "checksum of an event");
        events.push(event(data));
        rest = &rest[16 + length..];
    }
    events
}

/// CRC-32C bit by bit, turned and shifted as the format wants it.
fn masked(bytes: &[u8]) -> [u8; 4] {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn event(data: &[u8]) -> Event {
    let mut event = Event::default();
    for (field, value) in fields(data) {
        match (field, value) {
            (1, Field::Fixed64(bits)) => event.time = f64::from_bits(bits),
            (2, Field::Varint(step)) => event.step = step,
            (3, Field::Bytes(text)) => event.version = Some(String::from_utf8(text.to_vec()).unwrap()),
            (5, Field::Bytes(summary)) => {
                event.scalars = fields(summary)
                    .into_iter()
                    .map(|value| match value {
                        (1, Field::Bytes(value)) => match fields(value).as_slice() {
                            [(1, Field::Bytes(tag)), (2, Field::Fixed32(bits))] => {
                                (String::from_utf8(tag.to_vec()).unwrap(), f32::from_bits(*bits))
                            }
                            other => panic!("{other:?} in a value"),
                        },
                        other => panic!("{other:?} in a summary"),
                    })
                    .collect();
            }
            (7, Field::Bytes(log)) => match fields(log).as_slice() {
                [(1, Field::Varint(status))] => event.session = Some(*status),
                other => panic!("{other:?} in a session log"),
            },
            other => panic!("{other:?} in an event"),
        }
    }
    event
}

#[derive(Debug)]
enum Field<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
}

/// The fields of a protocol buffer, in order.
fn fields(mut data: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !data.is_empty() {
        let key = varint(&mut data);
        let field = match key & 7 {
            0 => Field::Varint(varint(&mut data)),
            1 => Field::Fixed64(u64::from_le_bytes(take(&mut data, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut data) as usize;
                Field::Bytes(take(&mut data, length))
            }
            5 => Field::Fixed32(u32::from_le_bytes(take(&mut data, 4).try_into().unwrap())),
            wire => panic!("wire type {wire}"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

fn take<'a>(data: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = data.split_at(count);
    *data = rest;
    taken
}

fn varint(data: &mut &[u8]) -> u64 {
    let length = data.iter().position(|byte| byte & 0x80 == 0).expect("a last byte") + 1;
    take(data, length).iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f))
}
