//! The mixture of experts of a text model.

use candle_cp_layers::{Error, Fields, Result};

/// Experts beside the MLP of every decoder layer; each token goes to a few of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeConfig {
    /// Number of experts of a layer.
    pub num_experts: usize,
    /// Number of experts that a token goes to, from 1 to `num_experts`.
    pub top_k: usize,
    /// Width inside an expert.
    pub intermediate_size: usize,
}

const REQUIRED: [&str; 3] = ["num_experts", "top_k_experts", "moe_intermediate_size"];

impl MoeConfig {
    /// Reads the fields of `text_config` that speak of experts; `None` if `enable_moe_block` is not true, whatever the
    /// other fields say.
    pub(super) fn read(fields: &Fields) -> Result<Option<Self>> {
        if !fields.flag("enable_moe_block", false)? {
            return Ok(None);
        }
        let missing = fields.missing(&REQUIRED);
        if !missing.is_empty() {
            return Err(Error::MissingFields { fields: missing });
        }
        let config = Self {
            num_experts: fields.listed("num_experts")?,
            top_k: fields.size("top_k_experts")?,
            intermediate_size: fields.size("moe_intermediate_size")?,
        };
        if config.top_k > config.num_experts {
            let reason = format!("must be from 1 to num_experts, which is {}", config.num_experts);
            return Err(fields.refuse("top_k_experts", reason));
        }
        Ok(Some(config))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: serde_json::Value) -> Result<Option<MoeConfig>> {
        MoeConfig::read(&Fields::new("text_config", &value)?)
    }

    #[test]
    fn the_fields_are_read_where_experts_are_on() {
        let on = json!({"enable_moe_block": true, "num_experts": 8, "top_k_experts": 8, "moe_intermediate_size": 16});
        let config = MoeConfig { num_experts: 8, top_k: 8, intermediate_size: 16 };
        assert_eq!(read(on).unwrap(), Some(config));
        for off in [json!({}), json!({"enable_moe_block": null}), json!({"enable_moe_block": false, "num_experts": 8})]
        {
            assert_eq!(read(off).unwrap(), None);
        }
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let error = |value| read(value).unwrap_err().to_string();
        let absent = error(json!({"enable_moe_block": true, "num_experts": null, "top_k_experts": 2}));
        assert!(absent.contains("text_config.num_experts, text_config.moe_intermediate_size"), "{absent}");
        let with = |k: i64, width: serde_json::Value| {
            error(
                json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": k, "moe_intermediate_size": width}),
            )
        };
        let many = with(5, 16.into());
        assert!(many.contains("text_config.top_k_experts is 5: must be from 1 to num_experts, which is 4"), "{many}");
        assert!(with(0, 16.into()).contains("text_config.top_k_experts is 0"));
        assert!(with(2, 0.5.into()).contains("text_config.moe_intermediate_size is 0.5"));
        assert!(error(json!({"enable_moe_block": 1})).contains("text_config.enable_moe_block is 1"));
    }
}
