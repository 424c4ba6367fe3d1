//! A look at intermediate tensors, for parity checks and for porting.

use std::collections::BTreeMap;

use candle_core::Tensor;

/// Receives intermediate tensors by name while a model runs.
///
/// The names are `rope.<layer type>.cos` and `.sin` (`rope.cos` and `.sin` where all layers share them), `vision.patch_embed`, `vision.layer.N`, `vision.tower_out`,
/// `vision.features`, `audio.subsample`, `audio.layer.N`, `audio.tower_out`, `audio.features` (padding included),
/// `mid.inputs_embeds`, `mid.hidden_states.N` (after decoder layer N) and `mid.final_norm`.
/// What the decoder records is the local slice of its rank.
pub trait Tap {
    /// Takes one tensor. The tensor is part of the graph; detach it to keep it without its history.
    ///
    /// # Errors
    /// Whatever the receiver reports; it ends the forward pass.
    fn record(&mut self, name: &str, x: &Tensor) -> candle_core::Result<()>;

    /// Whether anything is to be recorded; `false` skips work that only serves the tap.
    fn is_on(&self) -> bool {
        true
    }
}

/// Records nothing, at no cost.
impl Tap for () {
    fn record(&mut self, _name: &str, _x: &Tensor) -> candle_core::Result<()> {
        Ok(())
    }

    fn is_on(&self) -> bool {
        false
    }
}

/// Keeps everything.
impl Tap for BTreeMap<String, Tensor> {
    fn record(&mut self, name: &str, x: &Tensor) -> candle_core::Result<()> {
        self.insert(name.to_string(), x.clone());
        Ok(())
    }
}

/// Records under a numbered name, which is only put together if the tap is on.
pub fn record_numbered(tap: &mut dyn Tap, name: &str, number: usize, x: &Tensor) -> candle_core::Result<()> {
    match tap.is_on() {
        true => tap.record(&format!("{name}.{number}"), x),
        false => Ok(()),
    }
}
