//! What the towers give to the text model.

use candle_core::Tensor;

/// Soft tokens of a batch's images, or of its audio clips.
#[derive(Debug)]
pub(crate) struct Features {
    /// `[soft tokens of all items, text hidden]`, items in order.
    pub(crate) features_th: Tensor,
    /// Soft tokens of each item.
    pub(crate) per_item: Vec<usize>,
}

/// What placeholders of a batch are filled with.
#[derive(Debug, Default)]
pub(crate) struct Media {
    pub(crate) images: Option<Features>,
    pub(crate) audio: Option<Features>,
}
