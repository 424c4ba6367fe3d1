//! Rotary settings: which angles a layer type turns by.

use serde_json::Value;

use candle_cp_layers::{Fields, Result};

/// How the frequencies of a text layer's rotary embedding are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeKind {
    /// Every pair of head dimensions turns.
    Default,
    /// As `Default`, with every frequency divided by `factor`.
    Linear,
    /// Only the first `partial_rotary_factor` of the pairs turn, with the exponents of the full head size; the
    /// frequencies are divided by `factor`.
    Proportional,
}

/// Rotary settings of one layer type.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Layout of the frequencies.
    pub kind: RopeKind,
    /// Base of the geometric row of frequencies.
    pub theta: f64,
    /// Share of the head dimensions that turn, in 0..=1.
    pub partial_rotary_factor: f64,
    /// Divisor of all frequencies.
    pub factor: f64,
}

impl RopeConfig {
    /// Reads `rope_parameters.<layer type>` of the text model.
    pub(super) fn read(path: &str, value: &Value) -> Result<Self> {
        let fields = Fields::new(path, value)?;
        let missing = fields.missing(&["rope_type", "rope_theta"]);
        if !missing.is_empty() {
            return Err(candle_cp_layers::Error::MissingFields { fields: missing });
        }
        let kind = match fields.text("rope_type")? {
            Some("default") => RopeKind::Default,
            Some("linear") => RopeKind::Linear,
            Some("proportional") => RopeKind::Proportional,
            _ => {
                let reason = "not supported yet; allowed: \"default\", \"linear\", \"proportional\"";
                return Err(fields.refuse("rope_type", reason));
            }
        };
        let partial_rotary_factor = match fields.get("partial_rotary_factor").map(Value::as_f64) {
            None => 1.0,
            Some(Some(share)) if (0.0..=1.0).contains(&share) => share,
            Some(_) => return Err(fields.refuse("partial_rotary_factor", "a number from 0 to 1 is needed")),
        };
        let factor = fields.positive_if_present("factor")?.unwrap_or(1.0);
        if kind != RopeKind::Proportional && partial_rotary_factor != 1.0 {
            let reason = "only rope_type \"proportional\" turns a part of the head; with this rope_type it must be 1";
            return Err(fields.refuse("partial_rotary_factor", reason));
        }
        if kind == RopeKind::Default && factor != 1.0 {
            let reason = "rope_type \"default\" has no factor; use \"linear\" to divide the frequencies";
            return Err(fields.refuse("factor", reason));
        }
        Ok(Self { kind, theta: fields.positive("rope_theta")?, partial_rotary_factor, factor })
    }

    /// Angle per position of each pair of dimensions of a head: `[head_dim / 2]`; pairs that do not turn have 0.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f64> {
        let pairs = head_dim / 2;
        let turning = match self.kind {
            RopeKind::Default | RopeKind::Linear => pairs,
            RopeKind::Proportional => (self.partial_rotary_factor * head_dim as f64 / 2.0).floor() as usize,
        };
        let frequency = |pair: usize| match pair < turning {
            true => self.theta.powf(-((2 * pair) as f64) / head_dim as f64) / self.factor,
            false => 0.0,
        };
        (0..pairs).map(frequency).collect()
    }
}
