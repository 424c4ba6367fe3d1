//! What a model does, as far as memory and traffic depend on it: for planning a run without its weights.

use candle_cp::{DeltaHeads, MaskRule};

/// The decoder, and what is around it.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderShape {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The head's matrix is the embedding table.
    pub tied: bool,
    /// Width of the embeddings that enter each layer on their own, if there are any.
    pub per_layer_width: Option<usize>,
    /// Both halves of a layer end with a norm, and values have one.
    pub sandwich_norms: bool,
    /// The residual stream is multiplied by a constant after each layer.
    pub scaled_layers: bool,
    /// In order.
    pub layers: Vec<DecoderLayerShape>,
    /// What takes pictures, if anything does.
    pub vision: Option<VisionShape>,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderLayerShape {
    /// The first half.
    pub mixer: Mixer,
    /// Width of the gated MLP that every token goes through; `None` for none.
    pub mlp_width: Option<usize>,
    /// Experts beside it.
    pub experts: Option<ExpertsShape>,
}

/// What mixes tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Softmax attention.
    Attention(AttentionShape),
    /// A gated delta net.
    Delta {
        /// Its heads.
        heads: DeltaHeads,
        /// Taps of the convolution before it.
        taps: usize,
    },
}

impl Mixer {
    /// The kind of layer, in a table for people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Attention(attention) => attention.name,
            Self::Delta { .. } => "linear",
        }
    }
}

/// Attention of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionShape {
    /// The kind of layer.
    pub name: &'static str,
    /// What a query may see.
    pub rule: MaskRule,
    /// Query heads.
    pub query_heads: usize,
    /// Key and value heads.
    pub key_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Where keys and values come from.
    pub keys: KeyRole,
    /// One projection makes both.
    pub keys_are_values: bool,
    /// The output goes through a gate as wide as the queries.
    pub gated: bool,
}

/// What a layer does with keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRole {
    /// Makes its own and is the only one to read them: they travel around the ring in each pass.
    Own,
    /// Makes its own, and later layers read them as well: they are gathered once and kept.
    Lends,
    /// Reads those of an earlier layer.
    Reads,
}

/// Experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Their number.
    pub count: usize,
    /// How many a token goes to.
    pub top_k: usize,
    /// Width inside of one.
    pub width: usize,
}

/// What makes soft tokens of pictures.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionShape {
    /// Layers of the tower; 0 for a model that projects patches directly.
    pub layers: usize,
    /// Width of the tower.
    pub width: usize,
    /// Width inside its MLPs.
    pub mlp_width: usize,
    /// The MLPs have a gate, and every half ends with a norm.
    pub gated: bool,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub key_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Numbers in a patch.
    pub patch_len: usize,
    /// Patches that become one soft token.
    pub patches_per_token: usize,
    /// The most soft tokens of one picture as released.
    pub tokens_per_picture: usize,
    /// Inputs and outputs of projections are cut to bounds.
    pub clipped: bool,
    /// Patches of a soft token lie side by side before they are projected; otherwise it is their mean.
    pub merges: bool,
}
