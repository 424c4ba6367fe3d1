//! Plans of released models: the numbers that anyone can work out by hand, and advice.

use candle_core::DType;
use candle_cp::comm::Traffic;
use candle_finetune::planner::{DeviceSpec, Part, PlannedModel, Request, advise, plan};

fn h200() -> DeviceSpec {
    "h200".parse().unwrap()
}

/// A million tokens of the 31B model over 64 ranks, two replicas.
fn million() -> Request {
    Request { cp: 64, dp: 2, ..Request::new(1 << 20, h200()) }
}

#[test]
fn released_models_have_their_published_sizes() {
    let published = [5.1, 7.9, 25.8, 31.3, 9.4, 27.4, 35.1, 122.4];
    for (name, billions) in PlannedModel::names().zip(published) {
        let planned = plan(&PlannedModel::find(name).unwrap(), &Request::new(4096, h200())).unwrap();
        let found = planned.parameters.loaded as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.03, "{name}: {found} billion numbers");
        assert!(planned.parameters.trained <= planned.parameters.loaded);
    }
}

/// All expected numbers come from the sizes of the model by plain arithmetic.
#[test]
fn a_million_tokens_by_hand() {
    let (model, request) = (PlannedModel::find("31b").unwrap(), million());
    let planned = plan(&model, &request).unwrap();
    println!("{}", planned.text(&model, advise(&model, &request).unwrap().as_ref()));
    let (hidden, ranks) = (5376u64, 64u64);
    let local = (1 << 20) / ranks;
    assert_eq!(planned.local_tokens as u64, local);
    let numbers = planned.parameters.trained;
    let memory = &planned.memory;
    assert_eq!((memory.moments, memory.masters, memory.gradients), (8 * numbers, 4 * numbers, 4 * numbers));
    // The full row, looked up and scaled, and its slice, made of two pieces.
    assert_eq!(memory.embeddings, (2 << 20) * hidden * 2 + local * hidden * 2);
    let recomputed = &planned.memory_otherwise;
    let inputs = 2 * 60 * local * hidden * 2;
    assert!(
        recomputed.kept > inputs + memory.embeddings
            && recomputed.kept < (inputs + memory.embeddings) * 6 / 5 + memory.loss
    );

    // A full layer: the last tokens, of rank 0, see every head piece and every tail piece before them. Rank 63, whose pieces
    // lie in the middle, sends both to the 63 ranks whose tails are later; rank 0 only its head.
    let of = |name: &str| planned.kinds.iter().find(|kind| kind.name == name).unwrap();
    let (full, sliding) = (of("full"), of("sliding"));
    assert_eq!((full.count, sliding.count), (10, 50));
    let per_token = |key_heads: u64, head_dim: u64, bytes: u64| 2 * key_heads * head_dim * bytes;
    assert_eq!(full.passes[0].flow.sent, 63 * local * per_token(4, 512, 2));
    assert_eq!(full.passes[0].hops, 63);
    // The window before a piece: 1,024 tokens of each of the two pieces, to the owners of the pieces behind them.
    assert_eq!(sliding.passes[0].flow.sent, 2 * 1024 * per_token(16, 256, 2));
    let layers = |full: u64, sliding: u64| 10 * full * per_token(4, 512, 1) + 50 * sliding * per_token(16, 256, 1);
    let of_rank = |rank: usize, kind: Traffic| planned.traffic[rank][&kind].sent;
    // Pieces 0 and 127: the head goes to all, the tail to nobody; its window of keys goes to nobody either. Twice, bf16.
    assert_eq!(of_rank(0, Traffic::KeyValue), 2 * 2 * layers(63 * local / 2, 1024));
    // Gradients of what it received, f32: all the others' keys, and a window before the tail.
    assert_eq!(of_rank(0, Traffic::KeyValueGradient), 4 * layers(63 * local, 1024));

    let pairs = (1u64 << 40) as f64 / 2.0 / ranks as f64;
    let windows = 1024.0 * (1 << 20) as f64 / ranks as f64;
    let operations = 4.0 * 32.0 * (10.0 * 512.0 * pairs + 50.0 * 256.0 * windows);
    let work = planned.work.iter().find(|work| work.layout == request.layout).unwrap();
    assert!((work.mean / operations - 1.0).abs() < 1e-3, "{} and {operations}", work.mean);
    assert!(work.most / work.least < 1.01);

    let [reduce, gather] = planned.reduction_of(0);
    let share = numbers as f64 * 127.0 / 128.0 * 4.0;
    assert!((reduce.sent as f64 / share - 1.0).abs() < 1e-6 && (gather.sent as f64 / share - 1.0).abs() < 1e-6);
}

#[test]
fn the_first_change_that_helps_is_the_advice() {
    let model = PlannedModel::find("e2b").unwrap();
    let fits = Request { recompute: true, cp: 4, zero: true, ..Request::new(16_384, h200()) };
    assert!(plan(&model, &fits).unwrap().fits());
    // Activations alone are too much: running layers again is enough.
    let long = Request { recompute: false, cp: 1, ..Request::new(40_960, h200()) };
    let advice = advise(&model, &long).unwrap().expect("a change that helps");
    assert_eq!(advice.flags, ["--recompute"], "{:?}", advice.memory);
    assert!(advice.memory.peak() <= long.device.usable());
    assert_eq!(plan(&model, &advice.request).unwrap().memory, advice.memory);
    // Weights and gradients of 122 billion numbers do not fit, whatever is done.
    let large = PlannedModel::find("qwen-122b-a10b").unwrap();
    assert!(advise(&large, &Request { cp: 2, ..Request::new(4096, h200()) }).unwrap().is_none());
}

#[test]
fn what_cannot_be_planned_is_refused_with_a_reason() {
    let model = PlannedModel::find("e2b").unwrap();
    let base = || Request::new(1000, h200());
    let cases = [
        (Request { seq_len: 0, ..base() }, "--seq"),
        (Request { cp: 0, ..base() }, "--cp"),
        (Request { documents: 1001, ..base() }, "--documents"),
        (Request { pictures: 2, picture_tokens: 700, ..base() }, "--pictures"),
        (Request { dtype: DType::F16, ..base() }, "--dtype"),
        (Request { lora_rank: Some(0), ..base() }, "--lora-rank"),
    ];
    for (request, flag) in cases {
        let error = plan(&model, &request).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(flag), "{error}");
    }
    let error = PlannedModel::find("32b").unwrap_err().to_string();
    assert!(error.contains("32b") && error.contains("31b"), "{error}");
    assert!("h300".parse::<DeviceSpec>().unwrap_err().to_string().contains("a100"));
    let frozen = Request { freeze: [Part::Vision].into(), ..base() };
    let (all, frozen) = (plan(&model, &base()).unwrap(), plan(&model, &frozen).unwrap());
    assert!(frozen.parameters.trained < all.parameters.trained);
    assert_eq!(frozen.parameters.loaded, all.parameters.loaded);
}
