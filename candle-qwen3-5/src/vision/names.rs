//! The tower's tensors: name in a checkpoint, shape, and what each is.

use candle_cp_layers::{Role, Table};

use super::VisionShape;

/// Prefix of all of them.
const TOWER: &str = "model.visual";

/// The convolution over patches.
pub(super) fn patch_projection() -> String {
    format!("{TOWER}.patch_embed.proj")
}

/// The learned grid of positions.
pub(super) fn position_table() -> String {
    format!("{TOWER}.pos_embed.weight")
}

/// A block.
pub(super) fn block(index: usize) -> String {
    format!("{TOWER}.blocks.{index}")
}

/// What turns patches into soft tokens.
pub(super) fn merger() -> String {
    format!("{TOWER}.merger")
}

/// Adds all tensors of a tower of this shape to the table of a model; fresh values follow the table's `range`.
pub fn push_tensors(table: &mut Table, shape: &VisionShape) {
    let hidden = shape.hidden_size;
    let patch = patch_projection();
    let fan_in = shape.patch_len();
    table.push(format!("{patch}.weight"), &shape.patch_kernel(), Role::Matrix { fan_in, range: table.range });
    table.push(format!("{patch}.bias"), &[hidden], Role::Bias);
    table.matrix(position_table(), &[shape.num_position_embeddings, hidden]);
    for index in 0..shape.depth {
        let block = block(index);
        for norm in ["norm1", "norm2"] {
            layer_norm(table, &format!("{block}.{norm}"), hidden);
        }
        linear(table, &format!("{block}.attn.qkv"), [3 * hidden, hidden]);
        linear(table, &format!("{block}.attn.proj"), [hidden, hidden]);
        linear(table, &format!("{block}.mlp.linear_fc1"), [shape.intermediate_size, hidden]);
        linear(table, &format!("{block}.mlp.linear_fc2"), [hidden, shape.intermediate_size]);
    }
    let (merger, merged) = (merger(), shape.merged_len());
    layer_norm(table, &format!("{merger}.norm"), hidden);
    linear(table, &format!("{merger}.linear_fc1"), [merged, merged]);
    linear(table, &format!("{merger}.linear_fc2"), [shape.out_hidden_size, merged]);
}

/// A projection `[outputs, inputs]` with its bias.
fn linear(table: &mut Table, name: &str, [outputs, inputs]: [usize; 2]) {
    table.matrix(format!("{name}.weight"), &[outputs, inputs]);
    table.push(format!("{name}.bias"), &[outputs], Role::Bias);
}

fn layer_norm(table: &mut Table, name: &str, width: usize) {
    table.push(format!("{name}.weight"), &[width], Role::Norm);
    table.push(format!("{name}.bias"), &[width], Role::Bias);
}
