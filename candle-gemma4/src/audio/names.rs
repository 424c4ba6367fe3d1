//! The audio tower's tensors: names in a checkpoint, shapes, and what they are.

use crate::config::AudioConfig;
use crate::names::AUDIO_PROJECTION;
use candle_cp_layers::clip;
use candle_cp_layers::{Role, TensorSpec};

pub(super) const OUTPUT: &str = "model.audio_tower.output_proj";
pub(super) const SUBSAMPLE: &str = "model.audio_tower.subsample_conv_projection";

/// Prefix of a layer's tensors.
pub(super) fn layer(index: usize) -> String {
    format!("model.audio_tower.layers.{index}")
}

/// Projections of a layer that have bounds if the tower has them: name, outputs, inputs.
fn clippable(hidden: usize) -> [(&'static str, usize, usize); 10] {
    [
        ("feed_forward1.ffw_layer_1", 4 * hidden, hidden),
        ("feed_forward1.ffw_layer_2", hidden, 4 * hidden),
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", hidden, hidden),
        ("self_attn.v_proj", hidden, hidden),
        ("self_attn.post", hidden, hidden),
        ("lconv1d.linear_start", 2 * hidden, hidden),
        ("lconv1d.linear_end", hidden, hidden),
        ("feed_forward2.ffw_layer_1", 4 * hidden, hidden),
        ("feed_forward2.ffw_layer_2", hidden, 4 * hidden),
    ]
}

/// Norms of a layer, all as wide as the tower.
const NORMS: [&str; 9] = [
    "feed_forward1.pre_layer_norm",
    "feed_forward1.post_layer_norm",
    "norm_pre_attn",
    "norm_post_attn",
    "lconv1d.pre_layer_norm",
    "lconv1d.conv_norm",
    "feed_forward2.pre_layer_norm",
    "feed_forward2.post_layer_norm",
    "norm_out",
];

/// Every tensor of the tower and of the projection to the text model, which is `text_hidden` wide.
pub(crate) fn tensors(audio: &AudioConfig, text_hidden: usize) -> Vec<TensorSpec> {
    let mut table = Table { specs: Vec::new(), range: audio.initializer_range };
    let (hidden, [first, second]) = (audio.hidden_size, audio.subsampling_conv_channels);
    for (index, outputs, inputs) in [(0, first, 1), (1, second, first)] {
        table.matrix(format!("{SUBSAMPLE}.layer{index}.conv.weight"), &[outputs, inputs, 3, 3]);
        table.push(format!("{SUBSAMPLE}.layer{index}.norm.weight"), &[outputs], Role::Norm);
    }
    table.matrix(format!("{SUBSAMPLE}.input_proj_linear.weight"), &[hidden, audio.subsampled_mels() * second]);
    for index in 0..audio.num_hidden_layers {
        table.layer(&layer(index), audio);
    }
    table.matrix(format!("{OUTPUT}.weight"), &[audio.output_proj_dims, hidden]);
    table.push(format!("{OUTPUT}.bias"), &[audio.output_proj_dims], Role::Bias);
    table.matrix(AUDIO_PROJECTION.to_string(), &[text_hidden, audio.output_proj_dims]);
    table.specs
}

struct Table {
    specs: Vec<TensorSpec>,
    range: f64,
}

impl Table {
    fn push(&mut self, name: String, shape: &[usize], role: Role) {
        self.specs.push(TensorSpec { name, shape: shape.to_vec(), role });
    }

    /// A matrix or a convolution's kernels: all dimensions but the first are summed over.
    fn matrix(&mut self, name: String, shape: &[usize]) {
        let fan_in = shape[1..].iter().product();
        self.push(name, shape, Role::Matrix { fan_in, range: self.range });
    }

    fn layer(&mut self, prefix: &str, audio: &AudioConfig) {
        let hidden = audio.hidden_size;
        for (name, outputs, inputs) in clippable(hidden) {
            self.matrix(format!("{prefix}.{name}.linear.weight"), &[outputs, inputs]);
            for (bound, fresh) in clip::BOUNDS.into_iter().filter(|_| audio.use_clipped_linears) {
                self.push(format!("{prefix}.{name}.{bound}"), &[], Role::Buffer { fresh });
            }
        }
        for name in NORMS {
            self.push(format!("{prefix}.{name}.weight"), &[hidden], Role::Norm);
        }
        self.matrix(format!("{prefix}.self_attn.relative_k_proj.weight"), &[hidden, hidden]);
        self.push(format!("{prefix}.self_attn.per_dim_scale"), &[audio.head_dim()], Role::Bias);
        self.matrix(format!("{prefix}.lconv1d.depthwise_conv1d.weight"), &[hidden, 1, audio.conv_kernel_size]);
    }
}
