//! What differs from decoder layer to decoder layer: the type, heads, shared keys, widths.

use super::text::{LayerConfig, LayerKind};
use candle_cp_layers::{Error, Fields, Result};

/// Reads what every decoder layer is like.
pub(super) fn read(fields: &Fields) -> Result<Vec<LayerConfig>> {
    let kinds = read_layer_types(fields)?;
    let heads = fields.size("num_attention_heads")?;
    let head_dim = fields.size("head_dim")?;
    let key_value_heads = fields.size("num_key_value_heads")?;
    let intermediate_size = fields.size("intermediate_size")?;
    let keys_are_values = fields.flag("attention_k_eq_v", false)?;
    let mut layers: Vec<LayerConfig> = kinds
        .into_iter()
        .map(|kind| LayerConfig {
            kind,
            head_dim,
            num_key_value_heads: key_value_heads,
            keys_are_values: keys_are_values && kind == LayerKind::Full,
            keys_of: None,
            intermediate_size,
        })
        .collect();
    match fields.get("per_layer_config") {
        Some(value) => override_layers(fields, value, &mut layers)?,
        None => override_full_layers(fields, keys_are_values, &mut layers)?,
    }
    share_keys(fields, &mut layers)?;
    for (index, layer) in layers.iter().enumerate() {
        check_layer(fields, index, layer, heads, &layers)?;
    }
    Ok(layers)
}

/// The last `num_kv_shared_layers` layers read the keys and values of the last layer of their type before them all.
fn share_keys(fields: &Fields, layers: &mut [LayerConfig]) -> Result<()> {
    let shared = fields.count_or_zero("num_kv_shared_layers")?;
    let double_wide = fields.flag("use_double_wide_mlp", false)?;
    let count = layers.len();
    let Some(first) = count.checked_sub(shared).filter(|&first| first > 0) else {
        return Err(fields.refuse("num_kv_shared_layers", format!("must be below num_hidden_layers {count}")));
    };
    let (owning, reading) = layers.split_at_mut(first);
    for (index, layer) in reading.iter_mut().enumerate() {
        let index = first + index;
        let Some(source) = owning.iter().rposition(|owner| owner.kind == layer.kind) else {
            let kind = layer.kind.name();
            let reason = format!("layer {index} is \"{kind}\" and no layer before layer {first} is, to share with it");
            return Err(fields.refuse("num_kv_shared_layers", reason));
        };
        if owning[source].num_key_value_heads != layer.num_key_value_heads {
            let (its, own) = (owning[source].num_key_value_heads, layer.num_key_value_heads);
            let reason =
                format!("layer {index} has {own} key heads, but reads those of layer {source}, which has {its}");
            return Err(fields.refuse("num_kv_shared_layers", reason));
        }
        layer.keys_of = Some(source);
        layer.intermediate_size *= if double_wide { 2 } else { 1 };
    }
    Ok(())
}

fn read_layer_types(fields: &Fields) -> Result<Vec<LayerKind>> {
    let names = fields.texts("layer_types")?;
    let count = fields.size("num_hidden_layers")?;
    if names.len() != count {
        let reason = format!("layer_types has {} entries; the two must agree", names.len());
        return Err(fields.refuse("num_hidden_layers", reason));
    }
    let kind = |name: &&str| match *name {
        "sliding_attention" => Ok(LayerKind::Sliding),
        "full_attention" => Ok(LayerKind::Full),
        other => {
            let reason = format!(
                "layer type \"{other}\" is not supported yet; allowed: \"sliding_attention\", \"full_attention\""
            );
            Err(fields.refuse("layer_types", reason))
        }
    };
    let kinds = names.iter().map(kind).collect::<Result<Vec<_>>>()?;
    if kinds.last() != Some(&LayerKind::Full) {
        return Err(fields.refuse("layer_types", "the last layer must be \"full_attention\""));
    }
    Ok(kinds)
}

/// The newer spelling: `per_layer_config: { "<layer>": { head_dim, num_key_value_heads } }`.
fn override_layers(fields: &Fields, value: &serde_json::Value, layers: &mut [LayerConfig]) -> Result<()> {
    let path = fields.name("per_layer_config");
    for (key, settings) in Fields::new(&path, value)?.iter() {
        let count = layers.len();
        let layer = key.parse::<usize>().ok().and_then(|index| layers.get_mut(index));
        let layer = layer.ok_or_else(|| Error::Config {
            field: path.clone(),
            value: format!("\"{key}\""),
            reason: format!("a layer index from 0 to {} is needed", count - 1),
        })?;
        let path = format!("{path}.{key}");
        let settings = Fields::new(&path, settings)?;
        for (name, _) in settings.iter() {
            if !["head_dim", "num_key_value_heads"].contains(&name.as_str()) {
                return Err(settings.refuse(name, "not supported yet; allowed: head_dim, num_key_value_heads"));
            }
        }
        if let Some(head_dim) = settings.size_if_present("head_dim")? {
            layer.head_dim = head_dim;
        }
        if let Some(heads) = settings.size_if_present("num_key_value_heads")? {
            layer.num_key_value_heads = heads;
        }
    }
    Ok(())
}

/// The older spelling: `global_head_dim` and, only with `attention_k_eq_v`, `num_global_key_value_heads`.
fn override_full_layers(fields: &Fields, keys_are_values: bool, layers: &mut [LayerConfig]) -> Result<()> {
    let missing = fields.missing(&["global_head_dim"]);
    if !missing.is_empty() {
        return Err(Error::MissingFields { fields: missing });
    }
    let head_dim = fields.size("global_head_dim")?;
    let heads = match keys_are_values {
        true => fields.size_if_present("num_global_key_value_heads")?,
        false => None,
    };
    for layer in layers.iter_mut().filter(|layer| layer.kind == LayerKind::Full) {
        layer.head_dim = head_dim;
        layer.num_key_value_heads = heads.unwrap_or(layer.num_key_value_heads);
    }
    Ok(())
}

fn check_layer(fields: &Fields, index: usize, layer: &LayerConfig, heads: usize, layers: &[LayerConfig]) -> Result<()> {
    let refuse = |field: &str, value: usize, reason: String| Error::Config {
        field: fields.name(field),
        value: value.to_string(),
        reason,
    };
    if !layer.head_dim.is_multiple_of(2) {
        let reason = format!("the head size of layer {index} must be even, because dimensions turn in pairs");
        return Err(refuse("head_dim", layer.head_dim, reason));
    }
    if !heads.is_multiple_of(layer.num_key_value_heads) {
        let key_heads = layer.num_key_value_heads;
        let reason = format!("must be a multiple of the {key_heads} key heads of layer {index}");
        return Err(refuse("num_attention_heads", heads, reason));
    }
    match layers.iter().find(|other| other.kind == layer.kind) {
        Some(first) if first.head_dim != layer.head_dim => {
            let (first, kind) = (first.head_dim, layer.kind.name());
            let reason =
                format!("layer {index} differs from an earlier {kind} layer with {first}, but they share a rope");
            Err(refuse("per_layer_config", layer.head_dim, reason))
        }
        _ => Ok(()),
    }
}
