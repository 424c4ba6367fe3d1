//! Attention work and how long transfers take beside it.

use candle_cp::comm::Traffic;
use candle_cp::{LayerWork, LayoutKind, Tokens, live_work};

use super::devices::DeviceSpec;
use super::request::Request;
use super::traffic::{DecoderTraffic, Flow, RankTraffic, Sharing};
use crate::error::Result;
use crate::family::{DecoderShape, KeyRole, Mixer};

/// Products and sums per allowed pair, head and dimension: two products in forward, five in backward.
const OPERATIONS: [f64; 2] = [4.0, 10.0];

/// Attention work over the ranks of a layout, in operations of one forward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayoutWork {
    /// The layout.
    pub layout: LayoutKind,
    /// Of the rank with the least.
    pub least: f64,
    /// Of the rank with the most.
    pub most: f64,
    /// Mean over ranks.
    pub mean: f64,
    /// Pieces of a rank's slice, at most.
    pub pieces: usize,
}

/// The work of every layout, of one batch.
///
/// # Errors
/// A layout cannot be made.
pub(super) fn by_layout(tokens: &Tokens, ranks: usize, layers: &[LayerWork]) -> Result<Vec<LayoutWork>> {
    let of = |kind: LayoutKind| {
        let layout = kind.layout(tokens, ranks, layers)?;
        let work: Vec<f64> = live_work(&layout, tokens, layers)?.into_iter().map(|work| work * OPERATIONS[0]).collect();
        Ok(LayoutWork {
            layout: kind,
            least: work.iter().copied().fold(f64::INFINITY, f64::min),
            most: work.iter().copied().fold(0.0, f64::max),
            mean: work.iter().sum::<f64>() / ranks as f64,
            pieces: (0..ranks).map(|rank| layout.ranges(rank).len()).max().unwrap_or(0),
        })
    };
    LayoutKind::ALL.into_iter().map(of).collect()
}

/// One direction of a layer of some kind on the ranks that have most to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerPass {
    /// Traffic of the rank that sends most.
    pub flow: Flow,
    /// Distances between ranks at which anything is sent.
    pub hops: usize,
    /// Seconds that sending takes on the link.
    pub transfer: f64,
    /// Seconds of attention, of the rank with the least work.
    pub compute: f64,
}

impl LayerPass {
    /// Whether transfers end before the work beside them.
    pub fn hides(&self) -> bool {
        self.transfer <= self.compute
    }
}

/// All layers of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerKindPlan {
    /// The kind; layers that lend or read keys are kinds of their own.
    pub name: String,
    /// How many there are.
    pub count: usize,
    /// Forward, and backward with what runs again in it.
    pub passes: [LayerPass; 2],
    /// Tokens of a rank from which on transfers hide, forward and backward; `None` for no transfers or no attention.
    /// What is sent per token stays the same where a layer sees all tokens, what is computed grows; of a layer with a
    /// window the sent stays the same. Either way their ratio grows with the slice.
    pub hides_from: [Option<u64>; 2],
}

/// The kinds of layers of a model.
pub(super) fn kinds(
    shape: &DecoderShape,
    sharing: &Sharing,
    traffic: &DecoderTraffic,
    request: &Request,
) -> Vec<LayerKindPlan> {
    let local_tokens = sharing.layout.local_len(0);
    let mut kinds: Vec<(String, &Mixer, usize, usize)> = Vec::new();
    for (index, layer) in shape.layers.iter().enumerate() {
        let name = kind_name(&layer.mixer);
        match kinds.iter_mut().find(|(_, mixer, ..)| **mixer == layer.mixer) {
            Some((.., count)) => *count += 1,
            None => kinds.push((name, &layer.mixer, index, 1)),
        }
    }
    let plan = |(name, mixer, index, count): (String, &Mixer, usize, usize)| {
        let passes = [0, 1].map(|pass| layer_pass(mixer, (sharing, traffic), (index, pass), request));
        let hides_from = passes.map(|pass| match (pass.transfer > 0.0, pass.compute > 0.0) {
            (true, true) => Some((local_tokens as f64 * pass.transfer / pass.compute).ceil() as u64),
            _ => None,
        });
        LayerKindPlan { name, count, passes, hides_from }
    };
    kinds.into_iter().map(plan).collect()
}

fn kind_name(mixer: &Mixer) -> String {
    let role = match mixer {
        Mixer::Attention(attention) => match attention.keys {
            KeyRole::Own => "",
            KeyRole::Lends => ", lends keys",
            KeyRole::Reads => ", reads keys",
        },
        Mixer::Delta { .. } => "",
    };
    format!("{}{role}", mixer.name())
}

fn layer_pass(
    mixer: &Mixer,
    (sharing, traffic): (&Sharing, &DecoderTraffic),
    (layer, pass): (usize, usize),
    request: &Request,
) -> LayerPass {
    let device: &DeviceSpec = &request.device;
    let total = |rank: &[RankTraffic; 2]| rank[pass].values().fold(Flow::default(), |sum, flow| together(sum, *flow));
    let flow = traffic.layers[layer].iter().map(total).max_by_key(|flow| flow.sent).unwrap_or_default();
    let (hops, compute) = match mixer {
        Mixer::Attention(attention) => {
            let plan = &sharing.plans[&attention.rule];
            let hops = if attention.keys == KeyRole::Reads { 0 } else { plan.hops.first().map_or(0, Vec::len) };
            let pairs = plan.live_pairs.iter().min().copied().unwrap_or(0) as f64;
            let operations = pairs * (attention.query_heads * attention.head_dim) as f64;
            let [forward, backward] = device.attention(attention.head_dim);
            let again = if request.recompute { OPERATIONS[0] * operations / forward } else { 0.0 };
            (hops, [OPERATIONS[0] * operations / forward, OPERATIONS[1] * operations / backward + again][pass])
        }
        Mixer::Delta { .. } => (traffic.layers[layer].iter().map(|rank| halo_hops(&rank[0])).max().unwrap_or(0), 0.0),
    };
    LayerPass { flow, hops, transfer: flow.sent as f64 / device.link(request.cp), compute }
}

/// Messages of a halo, which go to one rank each.
fn halo_hops(traffic: &RankTraffic) -> usize {
    traffic.get(&Traffic::Halo).map_or(0, |flow| flow.messages as usize)
}

fn together(a: Flow, b: Flow) -> Flow {
    Flow {
        messages: a.messages + b.messages,
        sent: a.sent + b.sent,
        received: a.received + b.received,
        peak: a.peak + b.peak,
    }
}
