//! One rank's forward and backward pass: pictures, embeddings of the full row, the decoder on a slice, the loss.

use crate::family::{AttentionShape, DecoderLayerShape, DecoderShape, KeyRole, Mixer};

use super::layers::{Layers, Numbers, WIDE};
use super::tape::{Giving, Meter, Part, Rule, Stage, Tape, Value};
use super::tower::tower;

/// What one rank works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Work {
    pub numbers: Numbers,
    /// Tokens of the slice, all rows of the batch.
    pub local_tokens: u64,
    /// Tokens of the full rows.
    pub full_tokens: u64,
    /// Tokens with the layout's padding; equal where there is none.
    pub padded_tokens: u64,
    /// Pieces of the slice, each with its tokens, all rows of the batch.
    pub pieces: Vec<u64>,
    /// Soft tokens of all pictures.
    pub soft_tokens: u64,
    pub text_trained: bool,
    pub vision_trained: bool,
    pub lora_rank: Option<u64>,
    pub recompute: bool,
    /// Ranks that sum gradients.
    pub ranks: u64,
    /// By layer: keys of other ranks that lending layers keep, and remote bytes that are held in forward and backward.
    pub gathered_keys: Vec<u64>,
    pub remote: Vec<[u64; 2]>,
    /// Batch rows.
    pub batch: u64,
}

impl Work {
    /// Bytes of a number in the gradient of something trained: adapters are f32.
    pub fn gradient_number(&self) -> u64 {
        if self.lora_rank.is_some() { WIDE } else { self.numbers.number }
    }
}

/// What a pass needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PassMemory {
    /// The most at a time, without parameters and optimizer.
    pub peak: super::tape::Peak,
    /// What forward leaves for backward.
    pub kept: u64,
    /// Of these, before the decoder: pictures and the embeddings of the full rows.
    pub before_decoder: u64,
    /// Of these, of the vision tower.
    pub vision: u64,
    /// Gradients of weights that are not summed before the end of backward, in the type of the weights.
    pub weight_gradients: u64,
    /// Sums that have begun before, shares and what is on its way, f32.
    pub shares: u64,
    /// The head's loss: logits of a chunk and what is computed with them, gradients of head and hidden states included.
    pub loss: u64,
}

/// Walks through a pass. Sums of at most `on_the_way` bytes of gradients are on their way at a time.
pub(super) fn pass_memory(shape: &DecoderShape, work: &Work, on_the_way: u64) -> PassMemory {
    let mut tape = Tape::default();
    let table_bytes = (shape.vocab_size * shape.hidden_size) as u64 * work.numbers.number;
    let trained = work.text_trained && work.lora_rank.is_none();
    let table = tape.weight(table_bytes, trained);
    let features =
        shape.vision.as_ref().filter(|_| work.soft_tokens > 0).map(|vision| tower(&mut tape, vision, shape, work));
    let vision = tape.kept();
    let local = embed(&mut tape, shape, work, (table, features));
    let before_decoder = tape.kept();
    let hidden = decoder(&mut tape, shape, work, local);
    let head = if shape.tied { table } else { tape.weight(table_bytes, trained) };
    let (loss, loss_bytes) = loss(&mut tape, shape, work, (hidden, head));
    let giving = Giving { widths: [work.gradient_number(), WIDE], ranks: work.ranks, on_the_way };
    let mut meter = Meter::new(work.recompute.then_some(giving));
    tape.forward(&mut meter);
    tape.backward(&mut meter, &[loss], true);
    let weight_gradients = meter.weight_gradients;
    PassMemory {
        peak: meter.peak.clone(),
        kept: meter.most_kept,
        before_decoder,
        vision,
        weight_gradients,
        shares: meter.shares,
        loss: loss_bytes,
    }
}

/// Operations on the tokens of a slice, or on patches.
pub(super) fn layers<'a>(tape: &'a mut Tape, work: &Work, rows: u64, vision: bool) -> Layers<'a> {
    Layers {
        tape,
        numbers: work.numbers,
        rows,
        trained: if vision { work.vision_trained } else { work.text_trained },
        lora_rank: if vision { None } else { work.lora_rank },
        clipped: false,
        runs_again: work.recompute && !vision,
        remote: [0, 0],
    }
}

/// The full rows, looked up, scaled, with features in their places; and the slice of them.
fn embed(tape: &mut Tape, shape: &DecoderShape, work: &Work, (table, features): (Value, Option<Value>)) -> Value {
    tape.section("embeddings of the full row");
    let row = shape.hidden_size as u64 * work.numbers.number;
    let (full, text) = (work.full_tokens * row, (work.full_tokens - work.soft_tokens) * row);
    let looked_up = tape.op(&[table], text, Rule::Passed);
    let mut x = tape.op(&[looked_up], text, Rule::Made);
    if let Some(features) = features {
        x = tape.op(&[x, features], full + row, Rule::Passed);
        x = tape.op(&[x], full, Rule::Passed);
    }
    x = tape.view(x, full);
    if work.padded_tokens > work.full_tokens {
        x = tape.op(&[x], work.padded_tokens * row, Rule::Passed);
    }
    let padded = work.padded_tokens * row;
    // A piece of a single row is a view, and so is all of it; what is cut from several rows is copied.
    let piece = |tape: &mut Tape, bytes: u64, storage| {
        if bytes == padded { x } else { tape.op_with(&[x], [storage, bytes], 0, [0, 0], Rule::Padded) }
    };
    match work.pieces.as_slice() {
        [only] => piece(tape, only * row, if work.batch > 1 { only * row } else { 0 }),
        pieces => {
            let parts: Vec<Value> = pieces.iter().map(|tokens| piece(tape, tokens * row, 0)).collect();
            tape.op(&parts, work.local_tokens * row, Rule::Passed)
        }
    }
}

fn decoder(tape: &mut Tape, shape: &DecoderShape, work: &Work, mut x: Value) -> Value {
    let hidden = shape.hidden_size as u64;
    let per_layer = shape.per_layer_width.map(|width| per_layer(tape, shape, work, (x, width as u64)));
    let mut lent: Vec<(&'static str, Value, u64)> = Vec::new();
    for (index, layer) in shape.layers.iter().enumerate() {
        tape.section(format!("layer {index}, {}", layer.mixer.name()));
        x = mix(tape, shape, work, index, x, &mut lent);
        tape.section(format!("layer {index}, MLP"));
        let input = per_layer.map(|all| per_layer_input(tape, shape, work, all));
        x = transform(tape, shape, work, layer, x, input);
    }
    tape.section("final norm");
    layers(tape, work, work.local_tokens, false).norm(x, hidden, hidden)
}

/// Per-layer embeddings of all layers.
fn per_layer(tape: &mut Tape, shape: &DecoderShape, work: &Work, (x, width): (Value, u64)) -> Value {
    tape.section("per-layer embeddings");
    let all = width * shape.layers.len() as u64;
    let mut on = layers(tape, work, work.local_tokens, false);
    let trained = on.trained && on.lora_rank.is_none();
    let table = on.tape.weight(shape.vocab_size as u64 * all * work.numbers.number, trained);
    let bytes = on.bytes(all);
    let looked_up = on.tape.op(&[table], bytes, Rule::Passed);
    let mut of_ids = on.mapped(looked_up, all);
    if work.soft_tokens > 0 || work.padded_tokens > work.full_tokens {
        of_ids = on.tape.op(&[of_ids], bytes, Rule::Passed);
        of_ids = on.tape.op(&[of_ids], bytes, Rule::Passed);
    }
    let projected = on.linear(x, shape.hidden_size as u64, all);
    let projected = on.mapped(projected, all);
    let normed = on.norm(projected, all, width);
    let both = on.sum(normed, of_ids, all);
    on.mapped(both, all)
}

fn per_layer_input(tape: &mut Tape, shape: &DecoderShape, work: &Work, all: Value) -> Value {
    let width = shape.per_layer_width.unwrap_or(0) as u64;
    let bytes = work.local_tokens * width * work.numbers.number;
    let part = tape.op_with(&[all], [0, bytes], 0, [0, 0], Rule::Padded);
    tape.op(&[part], bytes, Rule::Passed)
}

/// The first half of a layer.
fn mix(
    tape: &mut Tape,
    shape: &DecoderShape,
    work: &Work,
    index: usize,
    x: Value,
    lent: &mut Vec<(&'static str, Value, u64)>,
) -> Value {
    let (hidden, remote) = (shape.hidden_size as u64, work.remote[index]);
    match &shape.layers[index].mixer {
        Mixer::Delta { heads, taps } => in_two(
            tape,
            work,
            remote,
            &[x],
            |on, x| {
                let normed = on.norm(x[0], hidden, hidden);
                on.delta_project(normed, hidden, heads, *taps as u64)
            },
            |on, x, projected| {
                let mixed = on.delta_mix(projected, hidden, heads);
                on.sum(x[0], mixed, hidden)
            },
        ),
        Mixer::Attention(attention) if attention.keys == KeyRole::Own => in_two(
            tape,
            work,
            remote,
            &[x],
            |on, x| {
                let normed = on.norm(x[0], hidden, hidden);
                on.project(normed, hidden, attention, shape.sandwich_norms)
            },
            |on, x, projected| attended(on, shape, attention, (x[0], projected), work.local_tokens),
        ),
        Mixer::Attention(attention) => {
            if attention.keys == KeyRole::Lends {
                let keys = lend(tape, shape, work, (index, x), attention);
                lent.push(keys);
            }
            let (_, keys, count) = *lent
                .iter()
                .rev()
                .find(|(name, ..)| *name == attention.name)
                .expect("a layer lends before others read");
            in_two(
                tape,
                work,
                [0, 0],
                &[x, keys],
                |on, x| {
                    let normed = on.norm(x[0], hidden, hidden);
                    on.queries(normed, hidden, attention)
                },
                |on, x, projected| {
                    let projected = [projected, &[x[1]]].concat();
                    attended(on, shape, attention, (x[0], &projected), count)
                },
            )
        }
    }
}

/// Keys and values of all ranks in reach, as one tensor.
fn lend(
    tape: &mut Tape,
    shape: &DecoderShape,
    work: &Work,
    (index, x): (usize, Value),
    attention: &AttentionShape,
) -> (&'static str, Value, u64) {
    let (hidden, width) = (shape.hidden_size as u64, (attention.key_heads * attention.head_dim) as u64);
    let stacked = work.local_tokens * 2 * width * work.numbers.number;
    let stack = in_two(
        tape,
        work,
        [0, 0],
        &[x],
        |_, _| Vec::new(),
        |on, x, _| {
            let normed = on.norm(x[0], hidden, hidden);
            let [key, value] = on.keys_values(normed, hidden, attention, shape.sandwich_norms);
            on.tape.op(&[key, value], stacked, Rule::Passed)
        },
    );
    let count = work.local_tokens + work.gathered_keys[index];
    let bytes = count * 2 * width * work.numbers.number;
    let half = tape.op_with(&[stack], [0, stacked / 2], 0, [0, 0], Rule::Padded);
    let other = tape.op_with(&[stack], [0, stacked / 2], 0, [0, 0], Rule::Padded);
    let [forward, backward] = work.remote[index];
    let sums = work.local_tokens * 2 * width * WIDE;
    (attention.name, tape.op_with(&[half, other], [bytes, bytes], 0, [forward, sums + backward], Rule::Made), count)
}

/// Attention, its gate and its projection, added to the input. `projected`: the gate where there is one, queries, keys.
fn attended(
    on: &mut Layers,
    shape: &DecoderShape,
    attention: &AttentionShape,
    (x, projected): (Value, &[Value]),
    keys: u64,
) -> Value {
    let (hidden, width) = (shape.hidden_size as u64, (attention.query_heads * attention.head_dim) as u64);
    let (gate, qkv) = if attention.gated { (Some(projected[0]), &projected[1..]) } else { (None, projected) };
    let mut mixed = on.attend(qkv, attention, keys);
    if let Some(gate) = gate {
        mixed = on.gated(gate, mixed, width);
    }
    mixed = on.linear(mixed, width, hidden);
    if shape.sandwich_norms {
        mixed = on.norm(mixed, hidden, hidden);
    }
    on.sum(x, mixed, hidden)
}

/// The second half of a layer.
fn transform(
    tape: &mut Tape,
    shape: &DecoderShape,
    work: &Work,
    layer: &DecoderLayerShape,
    x: Value,
    per_layer: Option<Value>,
) -> Value {
    let inputs: Vec<Value> = std::iter::once(x).chain(per_layer).collect();
    in_two(tape, work, [0, 0], &inputs, |_, _| Vec::new(), |on, inputs, _| second_half(on, shape, layer, inputs))
}

fn second_half(on: &mut Layers, shape: &DecoderShape, layer: &DecoderLayerShape, inputs: &[Value]) -> Value {
    let (x, hidden) = (inputs[0], shape.hidden_size as u64);
    let normed = on.norm(x, hidden, hidden);
    let of_mlp = layer.mlp_width.map(|width| on.mlp(normed, hidden, width as u64));
    let changed = match (layer.experts, shape.sandwich_norms) {
        (None, _) => of_mlp.unwrap_or(normed),
        (Some(experts), true) => {
            let input = on.norm(x, hidden, hidden);
            let of_experts = on.experts(input, x, hidden, experts, true);
            let of_mlp = on.norm(of_mlp.unwrap_or(normed), hidden, hidden);
            let of_experts = on.norm(of_experts, hidden, hidden);
            on.sum(of_mlp, of_experts, hidden)
        }
        (Some(experts), false) => {
            let of_experts = on.experts(normed, normed, hidden, experts, false);
            // The shared expert times its share.
            let shared = on.mapped(of_mlp.unwrap_or(normed), hidden);
            on.sum(of_experts, shared, hidden)
        }
    };
    let changed = if shape.sandwich_norms { on.norm(changed, hidden, hidden) } else { changed };
    let mut y = on.sum(x, changed, hidden);
    if let (Some(&input), Some(width)) = (inputs.get(1), shape.per_layer_width) {
        let width = width as u64;
        let gate = on.linear(y, hidden, width);
        let gated = on.gated(gate, input, width);
        let back = on.linear(gated, width, hidden);
        let normed = on.norm(back, hidden, hidden);
        y = on.sum(y, normed, hidden);
    }
    if shape.scaled_layers { on.mapped(y, hidden) } else { y }
}

/// A half in two stages, run again in backward if asked.
fn in_two(
    tape: &mut Tape,
    work: &Work,
    remote: [u64; 2],
    inputs: &[Value],
    first: impl Fn(&mut Layers, &[Value]) -> Vec<Value>,
    second: impl Fn(&mut Layers, &[Value], &[Value]) -> Value,
) -> Value {
    if !work.recompute {
        let mut on = layers(tape, work, work.local_tokens, false);
        on.remote = remote;
        let middle = first(&mut on, inputs);
        return second(&mut on, inputs, &middle);
    }
    let sizes: Vec<u64> = inputs.iter().map(|&input| tape.bytes_of(&[input])).collect();
    let leaves = |stage: &mut Stage, sizes: &[u64]| -> Vec<Value> {
        let leaves: Vec<Value> = sizes.iter().map(|&bytes| stage.tape.input(bytes, true)).collect();
        stage.inputs.extend(&leaves);
        leaves
    };
    let mut one = Stage::default();
    let given = leaves(&mut one, &sizes);
    one.outputs = first(&mut layers(&mut one.tape, work, work.local_tokens, false), &given);
    let made: Vec<u64> = one.outputs.iter().map(|&output| one.tape.bytes_of(&[output])).collect();
    let mut two = Stage::default();
    let (given, middle) = (leaves(&mut two, &sizes), leaves(&mut two, &made));
    let mut on = layers(&mut two.tape, work, work.local_tokens, false);
    on.remote = remote;
    let out = second(&mut on, &given, &middle);
    two.outputs = vec![out];
    let bytes = two.tape.bytes_of(&two.outputs);
    let first = (!one.outputs.is_empty()).then_some(one);
    tape.op(inputs, bytes, Rule::Again(Box::new(Part { first, second: two })))
}

/// The head and the cross entropy; also the bytes at work while it runs.
fn loss(tape: &mut Tape, shape: &DecoderShape, work: &Work, (hidden, head): (Value, Value)) -> (Value, u64) {
    tape.section("loss");
    let (vocabulary, width) = (shape.vocab_size as u64, shape.hidden_size as u64);
    let number = work.numbers.number;
    let chunk = chunk_tokens(vocabulary, work.numbers.cpu).min(work.local_tokens);
    let logits = chunk * vocabulary * WIDE;
    let d_hidden = work.local_tokens * width * number * u64::from(tape.is_tracked(hidden));
    let d_weight = vocabulary * width * u64::from(tape.is_tracked(head));
    let saved = d_hidden + d_weight * if work.numbers.cpu { number } else { WIDE };
    let scratch = match work.numbers.cpu {
        // The chunk's hidden states and the parts of their gradient in f32; the sum of the head's gradient, where it is
        // narrowed at the end.
        true => {
            let parts = parts(vocabulary);
            let wide = if number < WIDE { d_weight * WIDE } else { 0 };
            logits + chunk * width * WIDE * (1 + parts) + wide
        }
        // Logits, capped ones, shares and gradients exist side by side; a part of the head's gradient is added.
        false => 4 * logits + 2 * WEIGHT_ROWS.min(vocabulary) * width * WIDE * u64::from(d_weight > 0),
    };
    // Handed out by one multiplication per gradient on other devices.
    let finishing = if work.numbers.cpu { 0 } else { d_weight * (WIDE + number) };
    let out = tape.op_with(&[hidden, head], [WIDE, WIDE], saved, [scratch + saved, finishing], Rule::Ready);
    (out, scratch + saved)
}

/// Rows of the head whose gradient is one tensor on other devices than the CPU.
const WEIGHT_ROWS: u64 = 1 << 15;

/// Tokens whose logits exist at a time.
pub(super) fn chunk_tokens(vocabulary: u64, cpu: bool) -> u64 {
    let bytes = if cpu { 256 << 20 } else { 512 << 20 };
    (bytes / (vocabulary * WIDE)).clamp(1, 1024)
}

/// Sums of the hidden states' gradient that exist at a time on the CPU.
fn parts(vocabulary: u64) -> u64 {
    let block = vocabulary.div_ceil(32).next_multiple_of(64).min(2048);
    let blocks = vocabulary.div_ceil(block);
    blocks.div_ceil(blocks.div_ceil(32))
}
