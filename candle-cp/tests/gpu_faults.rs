//! Faults planted into copies of the attention kernels, each of which the emulator or the numbers have to tell.

mod common;
#[path = "common/direct.rs"]
mod direct;
#[path = "common/faults.rs"]
mod faults;

use candle_cp_kernels::gpu::GpuElement;
use common::devices::{DEVICES, dtype};
use common::ratio::{Pairs, composed_attention, kernel_deviation, rounded_data};
use common::{Case, Outcome, Rule, dense, documents};
use direct::{Direct, Placing, Problem, kernel_alone};
use faults::{Edit, KINDS};
use ptx_emulator::{Fault, Module};

const ELEMENT: GpuElement = GpuElement::F16;

/// A problem whose kernels are right, with everything that tells when they are not.
struct Trial {
    direct: Direct,
    module: Module,
    right: Outcome,
    composed: Outcome,
    reference: Outcome,
}

impl Trial {
    fn new(case: &Case, chunks: &[usize]) -> Self {
        let data = rounded_data(&case.data(), dtype(ELEMENT));
        let places = vec![(0..case.len() as u32).map(Some).collect(); case.batch()];
        let chunks = chunks.windows(2).map(|ends| ends[0]..ends[1]).collect();
        let problem = Problem { pairs: Pairs::of(case), places, chunks };
        let mut direct = Direct::new((ELEMENT, DEVICES[0]), problem, &data, Placing::default());
        let module = direct.module();
        let right = direct.outcome(&module).unwrap_or_else(|fault| panic!("{fault}"));
        let composed = composed_attention(case, &data, dtype(ELEMENT)).unwrap();
        let trial = Self { direct, module, right, composed, reference: dense(case, &data) };
        assert_eq!(trial.deviation(&trial.right), None);
        trial
    }

    fn deviation(&self, outcome: &Outcome) -> Option<String> {
        kernel_deviation("outcome", dtype(ELEMENT), (outcome, &self.composed, &self.reference))
    }

    /// The result with one kernel of a direction from another text.
    fn outcome(&mut self, kernel: &str, text: &str) -> Result<Outcome, Fault> {
        let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}"));
        let mut outcome = self.right.clone();
        if kernel.starts_with("forward") {
            (outcome.out, outcome.lse) = self.direct.forward(&module, &self.module)?;
        } else if kernel.starts_with("backward_queries") {
            outcome.dq = self.direct.gradient_of_queries(&module)?;
        } else {
            [outcome.dk, outcome.dv] = self.direct.gradients_of_keys(&module)?;
        }
        Ok(outcome)
    }

    /// What tells that the text is faulty, if anything does: whether it is a report of the emulator, and the message.
    fn found(&mut self, kernel: &str, text: &str) -> Option<(bool, String)> {
        match self.outcome(kernel, text) {
            Err(fault) => Some((true, fault.message().to_string())),
            Ok(outcome) => self.deviation(&outcome).map(|deviation| (false, deviation)),
        }
    }
}

/// Places of one kind that are tried in one kernel, of those that are executed at all.
const AT_MOST: usize = 5;

/// Plants faults of every kind into a kernel; all have to be found but those of `silent`.
fn plant(kernel: &str, silent: &[(&str, usize)]) {
    // Most queries see keys of two chunks, both of which end inside of a tile; there are full tiles and masked ones.
    let row = Case::row(documents(&[148, 2]), vec![-1; 150], Rule::sliding(100));
    let even = Case { key_heads: 1, group: 1, head_dim: 64, scale: 0.25, ..row };
    // Scores of many sizes tell when a row takes the maximum of another one, and hide most of the rest.
    let steep = Case { spread: 4.0, ..even.clone() };
    let mut trials = [even, steep].map(|case| Trial::new(&case, &[0, 20, 150]));
    let text = kernel_alone(trials[0].direct.text(), kernel);
    for trial in &mut trials {
        assert!(trial.found(kernel, &text).is_none(), "{kernel} alone is right");
    }
    let lines: Vec<&str> = text.lines().collect();
    for kind in KINDS {
        let edits = (kind.sites)(&lines);
        let (mut executed, mut missed) = (0, 0);
        for edit in spread(&edits) {
            if executed < AT_MOST && trials[0].found(kernel, &edit.trap().apply(&text)).is_some() {
                executed += 1;
                let faulty = edit.apply(&text);
                let found = trials.iter_mut().find_map(|trial| trial.found(kernel, &faulty));
                missed += usize::from(found.is_none());
                let fits = match &found {
                    Some((reported, message)) => {
                        kind.reports.is_empty() || *reported && kind.reports.iter().any(|part| message.contains(part))
                    }
                    None => silent.iter().any(|(name, _)| *name == kind.name),
                };
                assert!(fits, "{kernel}: {}: {edit:?}: {found:?}", kind.name);
            }
        }
        let expected = silent.iter().find(|(name, _)| *name == kind.name).map_or(0, |(_, count)| *count);
        assert_eq!(missed, expected, "{kernel}: {}", kind.name);
        assert!(executed > 0 || edits.is_empty(), "{kernel}: {}: no place is executed", kind.name);
    }
}

/// All edits, neighbours far from each other.
fn spread(edits: &[Edit]) -> impl Iterator<Item = &Edit> {
    // No kind has a multiple of 233 places, so that all are visited.
    (0..edits.len()).map(|i| &edits[i * 233 % edits.len()])
}

/// Before the last sums of the rows are written, a barrier waits for readers of what was there. They are gone: a visit
/// has another one after them.
#[test]
fn faults_in_forward() {
    plant("forward_r128_c64_w4x2", &[("a dropped barrier", 1)]);
}

#[test]
fn faults_in_the_gradient_of_queries() {
    plant("backward_queries_r64_c64_w2x4", &[]);
}

#[test]
fn faults_in_the_gradients_of_keys() {
    plant("backward_keys_r64_c64_w2x4", &[]);
}
