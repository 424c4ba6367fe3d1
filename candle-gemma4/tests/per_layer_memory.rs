//! Peak memory of the per-layer embeddings on one rank, by an allocator that counts. One test, as the counts are those of
//! the whole process.

#[path = "../../candle-cp/tests/common/counting.rs"]
mod counting;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{CommStats, Expected, Pending, Tag};
use candle_cp::{Communicator, CpContext, LayoutKind, Tokens};
use candle_gemma4::{Config, Inputs, Model, Tap, Weights};
use support::variant;

const ROWS: usize = 2;
const TOKENS: usize = 1024;
const LAYERS: usize = 7;
/// Wide, so that everything else that grows with the tokens is small beside it.
const WIDTH: usize = 128;

/// One rank of a group that never talks.
#[derive(Debug)]
struct Silent {
    rank: usize,
    size: usize,
    calls: AtomicU64,
}

impl Communicator for Silent {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn world_rank(&self, rank: usize) -> usize {
        rank
    }

    fn split(&self, _: usize) -> candle_cp::Result<Arc<dyn Communicator>> {
        panic!("per-layer embeddings need no group")
    }

    fn next_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn exchange(
        &self,
        tag: Tag,
        _: Option<(usize, Tensor)>,
        _: Option<Expected>,
    ) -> candle_cp::Result<Box<dyn Pending>> {
        panic!("per-layer embeddings need no exchange, but there is one: {tag}")
    }

    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}

/// Ends the forward pass where the per-layer inputs are ready.
#[derive(Default)]
struct Stop {
    of_ids: Vec<usize>,
    inputs: Vec<usize>,
    peak: usize,
}

impl Tap for Stop {
    fn record(&mut self, name: &str, x: &Tensor) -> candle_core::Result<()> {
        match name {
            "mid.per_layer_token_inputs" => self.of_ids = x.dims().to_vec(),
            "mid.per_layer_inputs" => {
                self.inputs = x.dims().to_vec();
                self.peak = counting::peak();
                candle_core::bail!("far enough")
            }
            other => panic!("{other} comes before the per-layer inputs are ready"),
        }
        Ok(())
    }
}

fn model() -> Model {
    let text = std::fs::read_to_string(variant("effective").join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["text_config"]["hidden_size_per_layer_input"] = WIDTH.into();
    let config = Config::from_json(&json.to_string()).unwrap();
    Model::new(&config, &Weights::random(&config, DType::F32, &Device::Cpu, 3).unwrap()).unwrap()
}

/// Bytes of one rank at the peak, beyond what was held before: its slices of embeddings and ids, and all that it takes to
/// make its per-layer inputs.
fn peak(model: &Model, embeds: &Tensor, ids: &Tensor, rank: usize, size: usize) -> usize {
    let tokens = Tokens::single_document(ROWS, TOKENS);
    let layout = LayoutKind::HeadTail.layout(&tokens, size, &[]).unwrap();
    let comm = Arc::new(Silent { rank, size, calls: AtomicU64::new(0) });
    let context = CpContext::new(comm, layout, tokens).unwrap();
    let before = counting::reset_peak();
    let local = model.shard(embeds, ids, &context).unwrap();
    let mut stop = Stop::default();
    let error = model.decode(&local, &context, &mut stop).unwrap_err();
    assert!(error.to_string().contains("far enough"), "{error}");
    let shape = [ROWS, TOKENS / size, LAYERS, WIDTH];
    assert_eq!((&stop.of_ids[..], &stop.inputs[..]), (&shape[..], &shape[..]), "rank {rank} of {size}");
    stop.peak - before
}

#[test]
fn a_rank_takes_its_share_of_the_memory() {
    let model = model();
    // Some of the padding token everywhere: its rows are looked up apart.
    let id = |index: usize| if index.is_multiple_of(8) { 4 } else { 12 + (index * 29 % 52) as u32 };
    let ids = Tensor::from_iter((0..ROWS * TOKENS).map(id), &Device::Cpu).unwrap().reshape((ROWS, TOKENS)).unwrap();
    let embeds = model.embed(&Inputs::text(ids.clone()), &mut ()).unwrap();
    // On one thread, so that the memory which products keep per thread exists after a first call.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        peak(&model, &embeds, &ids, 0, 1);
        let alone = peak(&model, &embeds, &ids, 0, 1);
        let table_output = ROWS * TOKENS * LAYERS * WIDTH * size_of::<f32>();
        assert!(alone >= 2 * table_output, "{alone} bytes are less than the two outputs that have to be there");
        for size in [2, 4, 8] {
            for rank in 0..size {
                let share = peak(&model, &embeds, &ids, rank, size) as f64 * size as f64 / alone as f64;
                assert!((share - 1.0).abs() < 0.02, "rank {rank} of {size} takes {share} times its share");
            }
        }
    });
}
