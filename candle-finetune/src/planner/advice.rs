//! What to change when a run does not fit.

use candle_core::DType;
use candle_cp_layers::Part;

use super::memory::{Parameters, buckets};
use super::{Memory, PlannedModel, Request, Sharing, share, traffic_and_memory};
use crate::error::Result;

/// Most doublings of the ranks that share a row.
const DOUBLINGS: u32 = 3;

/// Changes that make a run fit.
#[derive(Debug, Clone)]
pub struct Advice {
    /// Flags to add or to change.
    pub flags: Vec<String>,
    /// The run with them.
    pub request: Request,
    /// What it needs.
    pub memory: Memory,
}

/// A change: flags, and what they mean.
struct Change {
    flags: String,
    apply: Box<dyn Fn(&mut Request)>,
}

/// The changes, by what they cost: time of one more forward pass; a word between ranks; less exact weights; a longer step;
/// parts that do not learn; more devices; weights that do not learn at all.
fn changes(request: &Request) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut add = |applies: bool, flags: String, apply: Box<dyn Fn(&mut Request)>| {
        if applies {
            changes.push(Change { flags, apply });
        }
    };
    add(!request.recompute, "--recompute".to_string(), Box::new(|request| request.recompute = true));
    add(!request.zero && request.ranks() > 1, "--zero 1".to_string(), Box::new(|request| request.zero = true));
    add(request.dtype == DType::F32, "--dtype bf16".to_string(), Box::new(|request| request.dtype = DType::BF16));
    let rows = request.batch_rows * request.accumulate;
    add(
        request.batch_rows > 1,
        format!("--batch-rows 1 --accumulate {rows}"),
        Box::new(move |request| (request.batch_rows, request.accumulate) = (1, rows)),
    );
    add(
        request.lora_rank.is_none() && !request.freeze.contains(&Part::Vision),
        "--freeze vision".to_string(),
        Box::new(|request| request.freeze.extend([Part::Vision])),
    );
    for doubling in 1..=DOUBLINGS {
        let cp = request.cp << doubling;
        // A rank should own more than a tile of keys.
        let applies = cp * 2 * candle_cp::KEY_BLOCK <= request.seq_len;
        add(applies, format!("--cp {cp}"), Box::new(move |request| request.cp = cp));
    }
    let freezes_text = request.freeze.contains(&Part::Text);
    add(
        request.lora_rank.is_none() && !freezes_text,
        "--lora-rank 16".to_string(),
        Box::new(|request| request.lora_rank = Some(16)),
    );
    changes
}

/// The cheapest change that makes a run fit its device: the first one that does alone, else as few as it takes when they
/// are made in their order and those that turn out needless are taken back. Every candidate is planned anew. `None` if all
/// of them together do not help.
///
/// # Errors
/// As [`super::plan`].
pub fn advise(model: &PlannedModel, request: &Request) -> Result<Option<Advice>> {
    let mut candidates = Candidates { model, shared: Vec::new() };
    let all = changes(request);
    for change in &all {
        if let Some(advice) = candidates.fitting(request, &[change])? {
            return Ok(Some(advice));
        }
    }
    let mut made: Vec<&Change> = Vec::new();
    for change in &all {
        // A larger number of ranks takes the place of a smaller one.
        made.retain(|other| !(change.flags.starts_with("--cp") && other.flags.starts_with("--cp")));
        made.push(change);
        if candidates.fitting(request, &made)?.is_none() {
            continue;
        }
        for place in (0..made.len()).rev() {
            let mut fewer = made.clone();
            fewer.remove(place);
            if candidates.fitting(request, &fewer)?.is_some() {
                made = fewer;
            }
        }
        return candidates.fitting(request, &made);
    }
    Ok(None)
}

/// Requests that are tried.
struct Candidates<'a> {
    model: &'a PlannedModel,
    /// By the number of ranks and of rows, all that the changes change of it.
    shared: Vec<((usize, usize), Sharing)>,
}

impl Candidates<'_> {
    /// The request with changes, if it fits.
    fn fitting(&mut self, request: &Request, changes: &[&Change]) -> Result<Option<Advice>> {
        let mut request = request.clone();
        changes.iter().for_each(|change| (change.apply)(&mut request));
        let config = self.model.config.as_ref();
        let key = (request.cp, request.batch_rows);
        if !self.shared.iter().any(|(other, _)| *other == key) {
            self.shared.push((key, share(config, &request)?));
        }
        let (_, sharing) = self.shared.iter().find(|(other, _)| *other == key).expect("it was just made");
        let parameters = Parameters::count(config, &request, &buckets(config, &request)?);
        let (_, memory) = traffic_and_memory(&config.decoder_shape(), &parameters, &request, sharing);
        let flags = changes.iter().map(|change| change.flags.clone()).collect();
        Ok((memory.peak() <= request.device.usable()).then_some(Advice { flags, request, memory }))
    }
}
