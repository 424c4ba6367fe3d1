//! Pictures: the operations of the vision tower, or of what is in its place.

use crate::family::{AttentionShape, DecoderShape, KeyRole, VisionShape};

use super::graph::{Work, layers};
use super::layers::Layers;
use super::tape::{Rule, Tape, Value};

/// Pixels to features `[soft tokens, hidden]`; every rank runs all pictures.
pub(super) fn tower(tape: &mut Tape, vision: &VisionShape, shape: &DecoderShape, work: &Work) -> Value {
    let patches = work.soft_tokens * vision.patches_per_token as u64;
    let (width, hidden) = (vision.width as u64, shape.hidden_size as u64);
    let mut on = layers(tape, work, patches, true);
    on.tape.section("patches");
    let pixels = on.tape.input(0, false);
    let mut x = on.linear(pixels, vision.patch_len as u64, width);
    // Positions of two axes, their sum, padding cut off; added.
    let positions = on.tape.weight(0, on.trained);
    let bytes = on.bytes(width);
    for _ in 0..4 {
        x = on.tape.op(&[x, positions], bytes, Rule::Made);
    }
    on.clipped = vision.clipped;
    for index in 0..vision.layers {
        on.tape.section(format!("vision layer {index}"));
        x = vision_layer(&mut on, vision, x);
    }
    on.clipped = false;
    on.tape.section("soft tokens");
    if vision.merges {
        let merged = width * vision.patches_per_token as u64;
        x = on.norm(x, width, width);
        on.rows = work.soft_tokens;
        x = on.linear(x, merged, merged);
        x = on.activated(x, merged);
        return on.linear(x, merged, hidden);
    }
    if vision.layers > 0 {
        // Patches in the order of their cells, in f32; their mean.
        x = on.mapped(x, width);
    }
    on.rows = work.soft_tokens;
    for _ in 0..3 {
        x = on.mapped(x, width);
    }
    x = on.norm(x, width, 0);
    on.linear(x, width, hidden)
}

fn vision_layer(on: &mut Layers, vision: &VisionShape, x: Value) -> Value {
    let (width, mlp_width) = (vision.width as u64, vision.mlp_width as u64);
    let attention = AttentionShape {
        name: "vision",
        rule: candle_cp::MaskRule::bidirectional(),
        query_heads: vision.heads,
        key_heads: vision.key_heads,
        head_dim: vision.head_dim,
        keys: KeyRole::Own,
        keys_are_values: false,
        gated: false,
    };
    let rows = on.rows;
    let normed = on.norm(x, width, width);
    let qkv = match vision.gated {
        true => on.project(normed, width, &attention, true),
        false => {
            let all = on.linear(normed, width, 3 * width);
            let all = on.with_bias(all, 3 * width);
            let (bytes, whole) = (on.bytes(width), on.bytes(3 * width));
            let part = |on: &mut Layers| on.tape.op_with(&[all], [bytes, bytes], 0, [0, whole], Rule::Padded);
            let (q, k, v) = (part(on), part(on), part(on));
            vec![on.rope(q, width), on.rope(k, width), v]
        }
    };
    let mixed = on.attend(&qkv, &attention, rows);
    let mut mixed = on.linear(mixed, (vision.heads * vision.head_dim) as u64, width);
    mixed = if vision.gated { on.norm(mixed, width, width) } else { on.with_bias(mixed, width) };
    let x = on.sum(x, mixed, width);
    let normed = on.norm(x, width, width);
    let mut changed = match vision.gated {
        true => on.mlp(normed, width, mlp_width),
        false => {
            let up = on.linear(normed, width, mlp_width);
            let up = on.with_bias(up, mlp_width);
            let up = on.activated(up, mlp_width);
            on.linear(up, mlp_width, width)
        }
    };
    changed = if vision.gated { on.norm(changed, width, width) } else { on.with_bias(changed, width) };
    on.sum(x, changed, width)
}
