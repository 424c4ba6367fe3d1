//! What the targets matched.

use std::collections::BTreeMap;
use std::fmt;

use crate::weights::Part;

/// Which modules got an adapter, for the user to see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraReport {
    /// By target, in the order given. A module that several targets name counts for each of them.
    pub targets: Vec<TargetMatches>,
    /// Modules with an adapter.
    pub modules: usize,
    /// Numbers that are trained.
    pub parameters: usize,
}

/// The modules that a target matched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetMatches {
    /// The target.
    pub target: String,
    /// How many, for every part that was searched.
    pub modules: BTreeMap<Part, usize>,
}

impl fmt::Display for LoraReport {
    /// A line per target, and one for all of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for TargetMatches { target, modules } in &self.targets {
            let counts: Vec<String> = modules.iter().map(|(part, count)| format!("{count} {part}")).collect();
            writeln!(f, "LoRA target {target}: {}", counts.join(", "))?;
        }
        write!(f, "LoRA: {} modules, {} parameters", self.modules, self.parameters)
    }
}
