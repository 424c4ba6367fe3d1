//! The embedding table.

use candle_cp_layers::{Embedding, EmbeddingSettings, Result, Weights, table_scale};

use crate::config::Config;
use crate::names;

/// The table's rows times sqrt(hidden), with features of images and audio in the places of their placeholders.
pub(crate) fn embedding(config: &Config, weights: &Weights) -> Result<Embedding> {
    let text = &config.text;
    let table_vh = weights.get(&names::embed_tokens(config), &[text.vocab_size, text.hidden_size])?;
    // All ranks see all ids here. In the look-up of per-layer embeddings, which comes later, one rank alone would fail
    // and the others would wait for it.
    let (vocab_size, vocab_setting) = match text.per_layer {
        Some(table) if table.vocab_size < text.vocab_size => (table.vocab_size, "vocab_size_per_layer_input"),
        _ => (text.vocab_size, "vocab_size"),
    };
    let placeholders = config.placeholders();
    let settings = EmbeddingSettings { vocab_size, vocab_setting, pad_token_id: text.pad_token_id, placeholders };
    let scale = table_scale(text.hidden_size, table_vh.dtype())?;
    Ok(Embedding::new(table_vh, scale, settings))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use candle_cp_layers::Media;

    use super::*;

    #[test]
    fn looked_up_rows_are_scaled_in_the_type_of_the_table() -> Result<()> {
        let json = include_str!("../../fixtures/gemma4-dense/checkpoint/config.json");
        let json = json.replace("\"hidden_size\": 32", "\"hidden_size\": 1152");
        let config = Config::from_json(&json)?;
        assert_eq!(config.text.hidden_size, 1152);
        for (dtype, factor) in [(DType::F32, 33.941123962402344), (DType::BF16, 34.0)] {
            let weights = Weights::random(&config, dtype, &Device::Cpu, 5)?;
            let embedding = embedding(&config, &weights)?;
            let found = embedding.forward(&Tensor::new(&[[300u32, 301]], &Device::Cpu)?, &Media::default())?;
            let rows = embedding.table_vh().narrow(0, 300, 2)?.to_dtype(DType::F64)?;
            let expected = (rows * factor)?.to_dtype(dtype)?.to_dtype(DType::F64)?;
            let found = found.squeeze(0)?.to_dtype(DType::F64)?;
            let worst = (found / expected)?.affine(1.0, -1.0)?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(worst < 1e-6, "{dtype:?}: {worst}");
        }
        Ok(())
    }
}
