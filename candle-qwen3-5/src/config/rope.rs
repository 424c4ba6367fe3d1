//! Rotary settings: which angles a token's three positions turn its queries and keys by.

use serde_json::Value;

use candle_cp_layers::{Error, Fields, Result};

/// Share of the head that turns where neither place of the file says so, as in the library that writes these files.
const PARTIAL: f64 = 0.25;

/// Frequencies of each axis where the file does not say so, as in the library that writes these files.
const SECTIONS: [usize; 3] = [11, 11, 10];

/// Rotary settings of the full attention layers.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric row of frequencies.
    pub theta: f64,
    /// Dimensions of a head that turn, its first ones; even.
    pub turning: usize,
    /// How many frequencies belong to time, height and width.
    pub sections: [usize; 3],
}

impl RopeConfig {
    /// Reads `rope_parameters` of the text model, whose heads have `head_dim` dimensions.
    pub(super) fn read(text: &Fields, head_dim: usize) -> Result<Self> {
        let path = text.name("rope_parameters");
        let fields = Fields::new(&path, text.get("rope_parameters").unwrap_or(&Value::Null))?;
        let missing = fields.missing(&["rope_theta"]);
        if !missing.is_empty() {
            return Err(Error::MissingFields { fields: missing });
        }
        let kind = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
        fields.only(kind, "default")?;
        if !fields.flag("mrope_interleaved", true)? {
            let reason = "frequencies of the three axes are interleaved in this family; allowed: true";
            return Err(fields.refuse("mrope_interleaved", reason));
        }
        let (from, share) = match (fields.number("partial_rotary_factor")?, text.number("partial_rotary_factor")?) {
            (Some(share), _) => (&fields, share),
            (None, Some(share)) => (text, share),
            (None, None) => (text, PARTIAL),
        };
        let turning = (head_dim as f64 * share) as usize;
        if !(share > 0.0 && share <= 1.0) || turning == 0 || !turning.is_multiple_of(2) {
            let reason = format!("must be above 0 and at most 1, and turn an even number of the {head_dim} dimensions");
            return Err(from.refuse("partial_rotary_factor", reason));
        }
        let sections = match fields.get("mrope_section") {
            Some(_) => fields.sizes("mrope_section")?,
            None => SECTIONS,
        };
        Ok(Self { theta: fields.positive("rope_theta")?, turning, sections })
    }

    /// Angle per position of each pair of dimensions that turn, `[turning / 2]`, and the axis that the pair's position
    /// is of: 0 time, 1 height, 2 width.
    ///
    /// Axes take turns from pair to pair as far as their sections reach; time has what is left.
    pub fn pairs(&self) -> Vec<(f64, usize)> {
        let axis = |pair: usize| match pair % 3 {
            axis @ 1..=2 if pair < 3 * self.sections[axis] => axis,
            _ => 0,
        };
        let frequency = |pair: usize| self.theta.powf(-((2 * pair) as f64) / self.turning as f64);
        (0..self.turning / 2).map(|pair| (frequency(pair), axis(pair))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_take_turns_as_far_as_their_sections_reach() {
        let axes = |turning: usize, sections: [usize; 3]| -> Vec<usize> {
            let rope = RopeConfig { theta: 100.0, turning, sections };
            rope.pairs().into_iter().map(|(_, axis)| axis).collect()
        };
        assert_eq!(axes(16, [3, 3, 2]), [0, 1, 2, 0, 1, 2, 0, 1]);
        assert_eq!(axes(16, [6, 1, 1]), [0, 1, 2, 0, 0, 0, 0, 0]);
        assert_eq!(axes(64, [11, 11, 10])[27..], [0, 1, 2, 0, 1]);
        let pairs = RopeConfig { theta: 16.0, turning: 8, sections: [2, 1, 1] }.pairs();
        assert_eq!(pairs.iter().map(|(frequency, _)| *frequency).collect::<Vec<_>>(), [1.0, 0.5, 0.25, 0.125]);
    }
}
