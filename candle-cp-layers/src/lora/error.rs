//! What can be wrong with adapters.

use std::path::PathBuf;

use crate::weights::Part;

/// A request for adapters, or a file with some, that cannot be met.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A number is out of its range.
    #[error("LoRA {setting} is {value}; allowed: {allowed}")]
    Setting {
        /// `rank`, `alpha` or `dropout`.
        setting: &'static str,
        /// What was given.
        value: f64,
        /// Its range.
        allowed: &'static str,
    },

    /// The list of targets is empty.
    #[error("no LoRA targets given; name modules such as q_proj and v_proj, or all-linear")]
    NoTargets,

    /// The set of parts is empty.
    #[error("no part of the model given for LoRA; choose from text, vision, audio")]
    NoParts,

    /// A part was asked for that has no projection in this model.
    #[error("LoRA is asked for in the {part} part, which this model does not have; leave it out")]
    AbsentPart {
        /// The part.
        part: Part,
    },

    /// A target is the name of nothing that can be adapted in the chosen parts.
    #[error("LoRA target \"{target}\" matches no projection in the chosen part(s) {}{}{}; their projections are: {}",
        join(parts), elsewhere_text(elsewhere), nearest_text(nearest.as_deref()), known.join(", "))]
    NoMatch {
        /// The target.
        target: String,
        /// The parts that were searched.
        parts: Vec<Part>,
        /// Other parts, and how many modules it would match there.
        elsewhere: Vec<(Part, usize)>,
        /// The name in the chosen parts that is most like it.
        nearest: Option<String>,
        /// Last segments of all names in the chosen parts.
        known: Vec<String>,
    },

    /// A target is the name of something else than a projection.
    #[error(
        "LoRA target \"{target}\" is {what} ({name}), which cannot be adapted; targets are projections such as q_proj"
    )]
    NotLinear {
        /// The target.
        target: String,
        /// The first tensor that it names.
        name: String,
        /// What that is.
        what: &'static str,
    },

    /// There are adapters already.
    #[error("these weights have LoRA adapters already; load them anew to give them others")]
    Twice,

    /// Something was asked of adapters and there are none.
    #[error("these weights have no LoRA adapters; call `add_lora` or `load_lora` first")]
    Absent,

    /// A checkpoint was to be saved while adapters are attached.
    #[error("these weights have LoRA adapters: use `save_adapter` for the adapters, `save_merged` for the whole model")]
    Attached,

    /// A field of `adapter_config.json` has a value that is not supported.
    #[error("{}: {field} is {value}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Name of the field.
        field: String,
        /// The value found, as JSON; `absent` if there is none.
        value: String,
        /// What is allowed.
        reason: String,
    },

    /// The adapter file holds nothing.
    #[error("{}: no tensor ends with .lora_A.weight; this is no file of LoRA adapters", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

fn join(parts: &[Part]) -> String {
    parts.iter().map(Part::to_string).collect::<Vec<_>>().join(", ")
}

fn elsewhere_text(elsewhere: &[(Part, usize)]) -> String {
    let places: Vec<String> = elsewhere.iter().map(|(part, count)| format!("{count} in {part}")).collect();
    match places.is_empty() {
        true => String::new(),
        false => format!("; it would match {}", places.join(", ")),
    }
}

fn nearest_text(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!("; did you mean {name}?"))
}
