//! The parity tool: attention goldens, lengths that divide by nothing; and proof that the comparison notices what is wrong.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_cp::{LayoutKind, MaskRule};
use candle_cp_examples::attention::{AttentionCase, Route};
use candle_cp_examples::case::{Case, GIVEN, Tensors, read_tensors, write_tensors};
use candle_cp_examples::cli::{Arguments, explain};
use candle_cp_examples::compare::{compare_case, compare_gradients};
use candle_cp_examples::model::{Checkpoint, Computed, Settings};
use candle_cp_examples::report::{Report, compare};
use candle_cp_examples::tolerance::{GRADIENT, Tolerance, of_attention_tensor, of_model_tensor};
use clap::Parser;

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

fn golden(name: &str) -> PathBuf {
    fixture("gemma4-dense/goldens").join(format!("{name}.safetensors"))
}

fn golden_case(name: &str) -> Case {
    Case::load(&golden(name)).unwrap()
}

fn checkpoint() -> Checkpoint {
    Checkpoint::load(&fixture("gemma4-dense/checkpoint")).unwrap()
}

fn splits(ranks: &[usize]) -> Vec<(usize, LayoutKind)> {
    ranks.iter().flat_map(|&ranks| LayoutKind::ALL.map(|layout| (ranks, layout))).collect()
}

fn names(tensors: &Tensors) -> BTreeSet<&str> {
    tensors.keys().map(String::as_str).collect()
}

fn failed(report: &Report) -> Vec<&str> {
    report.comparisons.iter().filter(|c| !c.passed()).map(|c| c.name.as_str()).collect()
}

const IMAGE: u32 = 19;
const IMAGE_START: u32 = 17;
const IMAGE_END: u32 = 21;
/// Soft tokens of the two pictures of case 2.
const PICTURES: [usize; 2] = [12, 20];

enum Piece {
    Text(usize),
    Picture(usize),
}

/// Token ids of a row; text repeats after 232 tokens only.
fn row(pieces: &[Piece]) -> Vec<u32> {
    let mut ids = Vec::new();
    for piece in pieces {
        match *piece {
            Piece::Text(count) => {
                let start = ids.len();
                ids.extend((start..start + count).map(|i| 280 + (i as u32 * 37 + 11) % 232));
            }
            Piece::Picture(which) => {
                ids.push(IMAGE_START);
                ids.resize(ids.len() + PICTURES[which], IMAGE);
                ids.push(IMAGE_END);
            }
        }
    }
    ids
}

/// A case of `rows`, padded on the right, with the pictures of case 2 in the order of `pictures`.
fn build_case(rows: &[Vec<u32>], documents: &[Vec<i64>], pictures: &[u32]) -> Case {
    let length = rows.iter().map(Vec::len).max().unwrap();
    let padded = |row: &Vec<u32>| [row.clone(), vec![0; length - row.len()]].concat();
    let real = |row: &Vec<u32>| (0..length).map(|i| i64::from(i < row.len())).collect::<Vec<_>>();
    let label = |(i, &id): (usize, &u32)| if id < 280 || i % 7 == 0 { -100 } else { i64::from(id) };
    let labels = |row: &Vec<u32>| padded(row).iter().enumerate().map(label).collect::<Vec<_>>();
    let mut tensors = Tensors::new();
    let mut put = |name: &str, x: candle_core::Result<Tensor>| tensors.insert(name.into(), x.unwrap());
    put("input.input_ids", Tensor::new(rows.iter().map(padded).collect::<Vec<_>>(), &Device::Cpu));
    put("input.labels", Tensor::new(rows.iter().map(labels).collect::<Vec<_>>(), &Device::Cpu));
    put("input.attention_mask", Tensor::new(rows.iter().map(real).collect::<Vec<_>>(), &Device::Cpu));
    put("input.doc_ids", Tensor::new(documents.to_vec(), &Device::Cpu));
    if !pictures.is_empty() {
        let (source, pictures) = (golden_case("case2_images"), Tensor::new(pictures, &Device::Cpu).unwrap());
        for name in ["input.pixel_values", "input.image_position_ids"] {
            put(name, source.get(name).unwrap().index_select(&pictures, 0));
        }
    }
    Case::new(tensors).unwrap()
}

/// One token; one picture; two rows with padding; three documents with a picture longer than the window.
fn odd_cases() -> Vec<Case> {
    use Piece::{Picture, Text};
    let one = row(&[Text(1)]);
    let picture = row(&[Text(6), Picture(0), Text(17)]);
    let batch = [row(&[Text(9), Picture(1), Text(22)]), row(&[Text(5), Picture(0), Text(20)])];
    let packed = row(&[Text(7), Picture(0), Text(16), Text(19), Text(5), Picture(1), Text(18)]);
    let documents = [vec![0; 37], vec![1; 19], vec![2; 45]].concat();
    vec![
        build_case(&[one], &[vec![0]], &[]),
        build_case(&[picture], &[vec![0; 37]], &[0]),
        build_case(&batch, &[vec![0; 53], vec![0; 53]], &[1, 0]),
        build_case(&[packed], &[documents], &[0, 1]),
    ]
}

/// Rounding of another summation order, nothing more.
const ROUNDING: Tolerance = Tolerance::OfLargest { factor: 2e-5, at_least: 2e-6 };

fn assert_same(computed: &Tensors, reference: &Tensors, context: &str) {
    assert_eq!(names(computed), names(reference), "{context}");
    let mut report = Report::default();
    for (name, expected) in reference {
        report.add(compare(name, expected, &computed[name], ROUNDING, None).unwrap());
    }
    assert!(report.passed() && report.not_compared.is_empty(), "{context}\n{report}");
}

#[test]
fn lengths_that_divide_by_nothing() {
    let checkpoint = checkpoint();
    let run = |case: &Case, ranks, layout| -> Computed {
        checkpoint.run(case, &Settings { ranks, layout, gradients: true }).unwrap()
    };
    for (case, length) in odd_cases().iter().zip([1, 37, 53, 101]) {
        let single = run(case, 1, LayoutKind::Contiguous);
        assert_eq!(single.tensors["out.logits"].dim(1).unwrap(), length);
        let has_targets = single.tensors["out.num_valid"].to_vec1::<i64>().unwrap() != [0];
        assert_eq!(has_targets, length > 1);
        for (ranks, layout) in splits(&RANKS[1..]) {
            let sharded = run(case, ranks, layout);
            let context = format!("length {length}, cp {ranks}, {layout}");
            assert_same(&sharded.tensors, &single.tensors, &context);
            assert_same(&sharded.gradients, &single.gradients, &context);
        }
    }
}

fn attention_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixture("attention")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    files.sort();
    files
}

#[test]
fn attention_goldens() {
    let files = attention_files();
    assert_eq!(files.len(), 15);
    for file in files {
        let case = AttentionCase::load(&file).unwrap();
        let shard = file.file_name().unwrap().to_str().unwrap().contains("shard");
        assert_eq!(case.route(), if shard { Route::Kernel } else { Route::Ranks }, "{}", file.display());
        for (ranks, layout) in splits(if shard { &[1] } else { &RANKS }) {
            let mut report = Report::default();
            for dtype in [DType::F64, DType::F32] {
                case.compare(&case.run(dtype, ranks, layout).unwrap(), dtype, &mut report).unwrap();
            }
            assert!(report.passed(), "{}, cp {ranks}, {layout}\n{report}", file.display());
            assert_eq!((report.comparisons.len(), report.not_compared.len()), (12, 0));
        }
    }
}

/// The tensor in f64 with `by` added to the entry in the middle: in all cases used here a real token or patch.
fn nudged(x: &Tensor, by: f64) -> Tensor {
    let mut entries = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let middle = entries.len() / 2;
    entries[middle] += by;
    Tensor::from_vec(entries, x.dims(), &Device::Cpu).unwrap()
}

/// The difference that passes at the entry that [`nudged`] changes.
fn allowed(tolerance: Tolerance, x: &Tensor) -> f64 {
    let entries = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let largest = entries.iter().filter(|x| x.is_finite()).fold(0.0f64, |a, x| a.max(x.abs()));
    tolerance.allowed(entries[entries.len() / 2], largest)
}

#[test]
fn one_wrong_entry_fails_its_tensor_and_no_other() {
    for name in ["case2_images", "case3_padded", "case4_packed"] {
        let case = golden_case(name);
        let targets = case.get("out.num_valid").unwrap().to_vec1::<i64>().unwrap()[0] as f64;
        let outcome = |name: &str, by: f64| {
            let mut computed = case.tensors().clone();
            computed.insert(name.into(), nudged(&computed[name], by));
            compare_case(&case, &computed).unwrap()
        };
        for name in names(case.tensors()).into_iter().filter(|name| !GIVEN.contains(name)) {
            let limit = allowed(of_model_tensor(name, targets).unwrap(), case.get(name).unwrap());
            assert_eq!(failed(&outcome(name, if limit == 0.0 { 1.0 } else { 2.0 * limit })), [name]);
            assert!(outcome(name, 0.5 * limit).passed(), "{name}");
        }
    }
}

#[test]
fn one_wrong_gradient_fails() {
    let reference = read_tensors(&golden("case2_images.grads")).unwrap();
    for (name, gradient) in &reference {
        let outcome = |by: f64| {
            let mut computed = reference.clone();
            computed.insert(name.clone(), nudged(gradient, by));
            compare_gradients(&reference, &computed).unwrap()
        };
        let limit = allowed(GRADIENT, gradient);
        assert_eq!(failed(&outcome(2.0 * limit)), [name]);
        assert!(outcome(0.5 * limit).passed(), "{name}");
    }
}

#[test]
fn one_wrong_attention_entry_fails() {
    let case = AttentionCase::load(&fixture("attention/d16_sliding_vision_docs.safetensors")).unwrap();
    for dtype in [DType::F64, DType::F32] {
        for name in ["mask", "out", "lse", "dq", "dk", "dv"] {
            let outcome = |by: f64| {
                let mut computed = case.tensors().clone();
                computed.insert(name.into(), nudged(&computed[name], by));
                let mut report = Report::default();
                case.compare(&computed, dtype, &mut report).unwrap();
                report
            };
            let limit = allowed(of_attention_tensor(name, dtype, 1.0).unwrap(), &case.tensors()[name]);
            let by = if limit == 0.0 { 1.0 } else { 2.0 * limit };
            assert_eq!(failed(&outcome(by)), [format!("{} {name}", dtype.as_str())]);
            assert!(outcome(0.5 * limit).passed(), "{name}");
        }
    }
}

#[test]
fn large_scores_loosen_attention_in_f32() {
    let tensors = read_tensors(&fixture("attention/d16_full.safetensors")).unwrap();
    let outcome = |factor: f64, dtype| {
        let mut tensors = tensors.clone();
        tensors.insert("q".into(), (&tensors["q"] * factor).unwrap());
        let limit = allowed(Tolerance::OfLargest { factor: 1e-5, at_least: 1e-5 }, &tensors["out"]);
        let mut computed = tensors.clone();
        computed.insert("out".into(), nudged(&tensors["out"], limit));
        let mut report = Report::default();
        let case = AttentionCase::new(tensors, MaskRule::causal(), 1.0).unwrap();
        case.compare(&computed, dtype, &mut report).unwrap();
        report.passed()
    };
    assert!(!outcome(1.0, DType::F32));
    assert!(outcome(40.0, DType::F32));
    assert!(!outcome(40.0, DType::F64));
}

#[test]
fn tolerances_are_those_of_the_reference() {
    let absolute = |name: &str| of_model_tensor(name, 49.0).map(|t| t.allowed(3.0, 100.0));
    let expected = [
        ("out.logits", 5e-4),
        ("out.logits_at_positions", 5e-4),
        ("out.loss_mean", 1e-4),
        ("out.loss_sum", 49e-4),
        ("mid.inputs_embeds", 2e-4),
        ("mid.hidden_states.5", 2e-4),
        ("vision.features", 2e-4),
        ("router.top_k_weights.0", 1e-4),
        ("router.top_k_index.0", 0.0),
        ("mask.full_attention", 0.0),
        ("input.position_ids", 0.0),
        ("out.num_valid", 0.0),
    ];
    for (name, limit) in expected {
        assert_eq!(absolute(name), Some(limit), "{name}");
    }
    assert_eq!(of_model_tensor("out.positions", 1.0), None);
    assert_eq!(GRADIENT.allowed(0.0, 2.0), 2e-3);
    assert_eq!(GRADIENT.allowed(0.0, 1e-6), 1e-7);
    let attention =
        |name, dtype, score, largest| of_attention_tensor(name, dtype, score).unwrap().allowed(9.0, largest);
    assert_eq!(attention("dq", DType::F64, 1.0, 0.1), 2e-7);
    assert_eq!(attention("dq", DType::F64, 1.0, 10.0), 2e-6);
    assert_eq!(attention("out", DType::F32, 79.9, 10.0), 5e-5);
    assert_eq!(attention("out", DType::F32, 80.0, 10.0), 2e-4);
    assert_eq!(attention("lse", DType::F32, 80.0, 100.0), 18e-6);
}

/// `x` with NaN in the leading rows whose flag is false.
fn spoiled(x: &Tensor, keep: &[bool]) -> Tensor {
    let mut entries = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let width = entries.len() / keep.len();
    let rows = entries.chunks_mut(width).zip(keep).filter(|(_, keep)| !**keep);
    rows.for_each(|(row, _)| row.fill(f64::NAN));
    Tensor::from_vec(entries, x.dims(), &Device::Cpu).unwrap()
}

#[test]
fn padding_is_not_compared_and_the_rest_is() {
    let padded = golden_case("case3_padded");
    let tokens = padded.real_tokens().unwrap().concat();
    let rows = ["mask.full_attention", "mid.final_norm", "mid.inputs_embeds", "out.logits", "out.token_loss"];
    let images = golden_case("case2_images");
    let xy = images.get("input.image_position_ids").unwrap().flatten(0, 1).unwrap().to_vec2::<i64>().unwrap();
    let patches: Vec<bool> = xy.iter().map(|xy| xy != &[-1, -1]).collect();
    let layers = ["vision.patch_embed", "vision.layer.0", "vision.layer.1"];
    for (case, keep, names) in [(&padded, tokens, &rows[..]), (&images, patches, &layers[..])] {
        assert!(keep.contains(&true) && keep.contains(&false));
        for &name in names {
            let expected = case.get(name).unwrap();
            let with = |x: Tensor| {
                let mut computed = case.tensors().clone();
                computed.insert(name.into(), x);
                compare_case(case, &computed).unwrap()
            };
            let report = with(spoiled(expected, &keep));
            assert!(report.passed(), "{report}");
            let kept = keep.iter().filter(|&&keep| keep).count() * expected.elem_count() / keep.len();
            assert_eq!(report.get(name).unwrap().compared, kept);
            let mut one_real = vec![true; keep.len()];
            one_real[keep.iter().rposition(|&keep| keep).unwrap()] = false;
            assert_eq!(failed(&with(spoiled(expected, &one_real))), [name]);
        }
    }
}

#[test]
fn absent_and_misshapen_tensors_fail() {
    let case = golden_case("case2_images");
    let mut computed = case.tensors().clone();
    computed.remove("mid.final_norm");
    computed.insert("out.logits".into(), case.get("out.logits").unwrap().narrow(1, 0, 95).unwrap());
    assert_eq!(failed(&compare_case(&case, &computed).unwrap()), ["mid.final_norm", "out.logits"]);

    let mut tensors = case.tensors().clone();
    tensors.insert("input.image_position_ids".into(), Tensor::zeros((0, 198, 2), DType::I64, &Device::Cpu).unwrap());
    let report = compare_case(&Case::new(tensors).unwrap(), case.tensors()).unwrap();
    assert_eq!(failed(&report), ["vision.layer.0", "vision.layer.1", "vision.patch_embed"]);

    let mut tensors = case.tensors().clone();
    tensors.insert("something.else".into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
    let report = compare_case(&Case::new(tensors).unwrap(), case.tensors()).unwrap();
    assert!(report.passed() && report.not_compared[0].0 == "something.else");

    let mut reference = read_tensors(&golden("case4_packed.grads")).unwrap();
    let computed = reference.clone();
    reference.insert("model.unknown.weight".into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
    assert_eq!(failed(&compare_gradients(&reference, &computed).unwrap()), ["model.unknown.weight"]);
}

/// Runs the command line; its result and what it printed.
fn parity(arguments: &[&Path], flags: &[&str]) -> (Result<bool, String>, String) {
    let words = arguments.iter().map(|path| path.to_str().unwrap()).chain(flags.iter().copied());
    let mut printed = Vec::new();
    let result = Arguments::try_parse_from(std::iter::once("parity").chain(words)).unwrap().run(&mut printed);
    (result.map_err(|error| explain(&error)), String::from_utf8(printed).unwrap())
}

#[test]
fn a_dump_is_a_case_for_the_next_run() {
    let folder = tempfile::tempdir().unwrap();
    let (model, dump) = (fixture("gemma4-dense/checkpoint"), folder.path().join("dump.safetensors"));
    for (case, length) in odd_cases().iter().zip([1, 37, 53, 101]) {
        let inputs = folder.path().join("inputs.safetensors");
        write_tensors(&inputs, case.tensors()).unwrap();
        let (result, _) = parity(&[&model, &inputs], &[]);
        assert!(result.unwrap_err().contains("nothing to compare with"));

        let to = dump.to_str().unwrap();
        let (result, _) = parity(&[&model, &inputs], &["--cp", "4", "--layout", "head-tail", "--dump", to]);
        assert_eq!(result, Ok(true));
        let written = read_tensors(&dump).unwrap();
        for (name, x) in written.iter().filter(|(name, _)| name.starts_with("mid.") || name.starts_with("out.lo")) {
            assert!(x.elem_count() == 1 || x.dim(1).unwrap() == length, "{name} {:?}", x.dims());
        }
        let (result, table) = parity(&[&model, &dump], &["--cp", "3"]);
        assert_eq!(result, Ok(true), "{table}");

        let mut wrong = written;
        wrong.insert("mid.final_norm".into(), nudged(&wrong["mid.final_norm"], 1e-3));
        write_tensors(&dump, &wrong).unwrap();
        let (result, table) = parity(&[&model, &dump], &[]);
        assert_eq!(result, Ok(false));
        assert!(table.contains("1 past tolerance"), "{table}");
    }
}

#[test]
fn gradients_decide_too() {
    let folder = tempfile::tempdir().unwrap();
    let (model, case, path) =
        (fixture("gemma4-dense/checkpoint"), golden("case4_packed"), folder.path().join("grads.safetensors"));
    let mut gradients = read_tensors(&golden("case4_packed.grads")).unwrap();
    let name = "model.vision_tower.patch_embedder.input_proj.weight";
    gradients.insert(name.into(), nudged(&gradients[name], 1.0).to_dtype(DType::F32).unwrap());
    write_tensors(&path, &gradients).unwrap();
    let (result, table) = parity(&[&model, &case], &["--cp", "2", "--grads", path.to_str().unwrap()]);
    assert_eq!(result, Ok(false));
    assert_eq!(table.matches("FAIL").count(), 1, "{table}");
    let (result, _) = parity(&[&model, &case], &["--grads", case.to_str().unwrap()]);
    assert!(result.unwrap_err().contains("holds no gradient"));
}

#[test]
fn a_setting_that_is_not_supported_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(fixture("gemma4-dense/checkpoint/config.json")).unwrap();
    let changed = config.replace("\"attention_dropout\": 0.0", "\"attention_dropout\": 0.25");
    assert_ne!(changed, config);
    std::fs::write(folder.path().join("config.json"), changed).unwrap();
    let error = parity(&[folder.path(), &golden("case1_text")], &[]).0.unwrap_err();
    assert!(error.contains("attention_dropout") && error.contains("0.25"), "{error}");
}
