//! The gated delta rule across ranks, as a Candle operator with a backward pass.
//!
//! A rank's slice is a list of pieces, adjacent tokens of the row. What a piece does to the state of the recurrence is an
//! affine map, `S <- A S + B` with `A` `[dk, dk]` and `B` `[dk, dv]` per head, whatever the piece's length. So ranks do not
//! wait for each other in a line: each makes the maps of its pieces at once, one all-gather hands them round, and each
//! composes the states before its own pieces. Backward is the same with the transposed maps, from the last piece to the
//! first; there only the gradients `[dk, dv]` travel, the `A` are still there.
//!
//! Documents cut this short, and every rank knows where: nothing is made or sent for a piece whose last document ends with
//! it; a piece in which a document starts has `A = 0`, and its `B` is the state at which a run from zeros ends, so the run is
//! not made twice. Where no document lies in two pieces (always so on one rank) the ranks say nothing at all.
//!
//! Head-tail slices stay as attention wants them, with states passed per piece in sequence order, rather than being re-laid
//! for these layers. Counted for `H` heads with dk = dv = d over P ranks, when one document fills the row: a rank has at most
//! two pieces and sends `4 (P - 1) H d^2` f32 numbers forward and half as many backward, however long the row is. Re-laying
//! would move nearly every token, queries, keys and values one way and the output back, `4 H d S / P` numbers in the type of
//! the model, and again in backward. States are fewer bytes from `S / P = 0.75 (P - 1) d` tokens per rank on (twice that for
//! bf16): 672 tokens for 8 ranks and d = 128, and fewer where documents end inside of slices.
//!
//! DIFFERENCE: transformers' CPU code runs on across the documents of a packed row. Here the state restarts with each.

mod plan;
mod states;

use crate::comm::{Communicator, OpenSpan, Row};
use crate::element::{Element, dispatch, slice, with_cpu_storage};
use crate::error::{Error, Result};
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Tensor, WithDType};
use candle_cp_kernels::{
    self as kernels, DeltaBackward, DeltaBackwardRun, DeltaBlocks, DeltaForward, DeltaForwardRun, DeltaGradients,
    DeltaHeads, DeltaInputs, DeltaRun, Element as _, Real,
};
use plan::OwnRun;
pub(crate) use plan::StatePlan;
use states::{Made, Maps, Places, final_gradients};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// See [`crate::CpContext::delta_rule`].
pub(crate) fn delta_rule(
    comm: &Arc<dyn Communicator>,
    plan: &Arc<StatePlan>,
    (qkv, g, beta): (&Tensor, &Tensor, &Tensor),
    heads: &DeltaHeads,
) -> Result<Tensor> {
    let sums = check(plan, (qkv, g, beta), heads)?;
    let [g, beta] = [g.to_dtype(sums)?.contiguous()?, beta.to_dtype(sums)?.contiguous()?];
    let op = DeltaRule { comm: comm.clone(), plan: plan.clone(), heads: *heads, saved: Mutex::new(None) };
    Ok(qkv.contiguous()?.apply_op3(&g, &beta, op)?)
}

/// Returns the type that sums run in.
fn check(plan: &StatePlan, (qkv, g, beta): (&Tensor, &Tensor, &Tensor), heads: &DeltaHeads) -> Result<DType> {
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = *heads;
    if [key_heads, value_heads, key_dim, value_dim].contains(&0) || value_heads % key_heads != 0 {
        let allowed = "sizes are at least 1 and the value heads a multiple of the key heads";
        return Err(Error::argument("heads", format!("{heads:?}"), allowed, "check the configuration"));
    }
    let (of_qkv, of_gates) = ([plan.batch, plan.local_len, heads.width()], [plan.batch, plan.local_len, value_heads]);
    if qkv.dims() != of_qkv || g.dims() != of_gates || beta.dims() != of_gates {
        let given = format!("qkv {:?}, g {:?}, beta {:?}", qkv.dims(), g.dims(), beta.dims());
        let allowed = format!("this rank has qkv {of_qkv:?}, g and beta {of_gates:?}");
        let fix = "shard the tensors with the context that runs the rule";
        return Err(Error::argument("qkv, g, beta", given, allowed, fix));
    }
    if let Some(other) = [qkv, g, beta].into_iter().find(|x| !x.device().is_cpu()) {
        let given = format!("{:?}", other.device().location());
        return Err(Error::argument("device", given, "the delta rule has no CUDA kernels yet", "run on the CPU"));
    }
    for x in [qkv, g, beta] {
        if !matches!(x.dtype(), DType::F32 | DType::F64 | DType::BF16 | DType::F16) {
            let allowed = "the delta rule runs in f32, f64, bf16 and f16";
            return Err(Error::argument("dtype", format!("{:?}", x.dtype()), allowed, "convert qkv, g, beta"));
        }
    }
    Ok(if qkv.dtype() == DType::F64 { DType::F64 } else { DType::F32 })
}

/// What spans of work are called in a trace.
const FORWARD: &str = "delta rule forward";
const BACKWARD: &str = "delta rule backward";

struct DeltaRule {
    comm: Arc<dyn Communicator>,
    plan: Arc<StatePlan>,
    heads: DeltaHeads,
    /// A [`Saved`] in the type of the sums, from forward.
    saved: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
}

/// What backward needs of forward.
struct Saved<T> {
    /// States before this rank's runs, `[Hv, dk, dv]`.
    initial: Vec<Option<Vec<T>>>,
    /// States inside of them.
    blocks: Vec<DeltaBlocks<T>>,
    transitions: Places<Tensor>,
}

impl CustomOp3 for DeltaRule {
    fn name(&self) -> &'static str {
        "delta_rule"
    }

    fn cpu_fwd(
        &self,
        qkv: &CpuStorage,
        qkv_layout: &Layout,
        g: &CpuStorage,
        g_layout: &Layout,
        beta: &CpuStorage,
        beta_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let out = dispatch!(qkv.dtype(), T => {
            let qkv = T::widen_all(slice(qkv, qkv_layout)?);
            let inputs = self.inputs(&qkv, [slice(g, g_layout)?, slice(beta, beta_layout)?]);
            T::to_cpu_storage_owned(self.forward::<T>(&inputs)?)
        });
        let StatePlan { batch, local_len, .. } = *self.plan;
        Ok((out, (batch, local_len, self.heads.value_heads, self.heads.value_dim).into()))
    }

    fn bwd(
        &self,
        qkv: &Tensor,
        g: &Tensor,
        beta: &Tensor,
        _: &Tensor,
        d_out: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (d_out, dims) = (d_out.contiguous()?, qkv.dims());
        let (d_qkv, d_g, d_beta) = dispatch!(qkv.dtype(), T => {
            with_cpu_storage(qkv, |q, ql| with_cpu_storage(g, |g, gl| with_cpu_storage(beta, |b, bl| {
                with_cpu_storage(&d_out, |d, dl| {
                    let (qkv, d_out) = (T::widen_all(slice(q, ql)?), T::widen_all(slice(d, dl)?));
                    let inputs = self.inputs(&qkv, [slice(g, gl)?, slice(b, bl)?]);
                    let gradients = self.backward::<T>(&inputs, &d_out)?;
                    let tensor = Tensor::from_vec(gradients.qkv, dims, &Device::Cpu)?;
                    let gates = [gradients.g, gradients.beta].map(|x| Tensor::from_vec(x, beta.dims(), &Device::Cpu));
                    let [d_g, d_beta] = gates;
                    Ok((tensor, d_g?, d_beta?))
                })
            })))?
        });
        Ok((Some(d_qkv), Some(d_g), Some(d_beta)))
    }
}

impl DeltaRule {
    fn inputs<'a, T: Real>(&self, qkv: &'a [T], [g, beta]: [&'a [T]; 2]) -> DeltaInputs<'a, T> {
        DeltaInputs::new(self.heads, (self.plan.batch, self.plan.local_len), qkv, g, beta)
    }

    /// This rank's runs for which `wanted` holds, with their numbers.
    fn runs(&self, wanted: impl Fn(&OwnRun) -> bool) -> Vec<(usize, &OwnRun)> {
        self.plan.runs.iter().enumerate().filter(|(_, own)| wanted(own)).collect()
    }

    fn work(&self, name: &'static str) -> OpenSpan {
        self.comm.trace().span(Row::Compute, name)
    }

    fn forward<T: Element>(&self, inputs: &DeltaInputs<T::Acc>) -> Result<Vec<T>> {
        let (plan, count) = (&self.plan, self.plan.runs.len());
        let mut out = DeltaForward::new(self.heads, plan.batch * plan.local_len);
        let mut blocks: Vec<Option<DeltaBlocks<T::Acc>>> = (0..count).map(|_| None).collect();
        let mut span = self.work(FORWARD);
        // What starts here needs nobody else; where it ends is what the next piece starts from.
        let starting = self.runs(|own| !own.continues);
        let work: Vec<_> = starting.iter().map(|(_, own)| forward_run(own, None, own.carries)).collect();
        let mut states = Made::new();
        for ((number, own), passed) in starting.into_iter().zip(out.run(inputs, &work)) {
            blocks[number] = Some(passed.blocks);
            if own.carries {
                states.push((place(own), passed.final_state));
            }
        }
        let mut initial: Vec<Option<Vec<T::Acc>>> = vec![None; count];
        let mut transitions = Places::new();
        if plan.crosses() {
            let (through, work) = self.through();
            let made = kernels::delta_states(inputs, &work).into_iter();
            states.extend(through.iter().copied().zip(made));
            let made = through.into_iter().zip(kernels::delta_transitions(inputs, &work)).collect();
            drop(span);
            let maps = Maps::exchange(self.comm.as_ref(), plan, &self.heads, (states, made))?;
            span = self.work(FORWARD);
            let before = maps.initial(plan)?;
            transitions = maps.into_transitions(plan)?;
            for (number, own) in self.runs(|own| own.continues) {
                initial[number] = Some(numbers(&before, own)?);
            }
        }
        let continuing = self.runs(|own| own.continues);
        let work: Vec<_> =
            continuing.iter().map(|(number, own)| forward_run(own, initial[*number].as_deref(), false)).collect();
        for ((number, _), passed) in continuing.into_iter().zip(out.run(inputs, &work)) {
            blocks[number] = Some(passed.blocks);
        }
        drop(span);
        let blocks = blocks.into_iter().map(|blocks| blocks.expect("every run was passed")).collect();
        let saved = Saved { initial, blocks, transitions };
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(saved));
        Ok(out.finish())
    }

    fn backward<T: Element>(&self, inputs: &DeltaInputs<T::Acc>, d_out: &[T::Acc]) -> Result<DeltaGradients<T>> {
        let plan = &self.plan;
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let saved =
            saved.and_then(|saved| saved.downcast::<Saved<T::Acc>>().ok()).expect("forward ran before backward");
        let mut gradients = DeltaBackward::new(self.heads, plan.batch * plan.local_len);
        let mut span = self.work(BACKWARD);
        // What ends here needs nobody else, and gives what comes before it the whole gradient of its last state.
        let ending = self.runs(|own| !own.carries);
        let work: Vec<_> = ending.iter().map(|&(number, own)| backward_run(own, number, &saved, None)).collect();
        let mut initial: Made<T::Acc> = Vec::new();
        for ((_, own), gradient) in ending.into_iter().zip(gradients.run(inputs, &work, d_out)) {
            if own.continues {
                initial.push((place(own), gradient));
            }
        }
        if plan.crosses() {
            let (through, work) = self.through();
            initial.extend(through.into_iter().zip(kernels::delta_initial_gradients(inputs, &work, d_out)));
            drop(span);
            let after = final_gradients(self.comm.as_ref(), plan, &self.heads, &saved.transitions, initial)?;
            span = self.work(BACKWARD);
            let carrying = self.runs(|own| own.carries);
            let finals = carrying.iter().map(|(_, own)| numbers(&after, own)).collect::<Result<Vec<_>>>()?;
            let work = carrying.iter().zip(&finals).map(|(&(number, own), last)| DeltaBackwardRun {
                keep_initial: false,
                ..backward_run(own, number, &saved, Some(last))
            });
            gradients.run(inputs, &work.collect::<Vec<_>>(), d_out);
        }
        drop(span);
        Ok(gradients.finish())
    }

    /// The runs that have to be known as maps.
    fn through(&self) -> (Vec<(usize, usize)>, Vec<DeltaRun>) {
        self.runs(OwnRun::is_through).into_iter().map(|(_, own)| (place(own), own.run.clone())).unzip()
    }
}

fn place(own: &OwnRun) -> (usize, usize) {
    (own.piece, own.run.row)
}

/// The matrices at the place of a run, which are there.
fn numbers<T: WithDType>(places: &Places<Tensor>, own: &OwnRun) -> Result<Vec<T>> {
    let (piece, row) = place(own);
    Ok(places[piece][row].as_ref().expect("a run with a neighbour").flatten_all()?.to_vec1()?)
}

fn forward_run<'a, T>(own: &OwnRun, initial: Option<&'a [T]>, keep_final: bool) -> DeltaForwardRun<'a, T> {
    DeltaForwardRun { run: own.run.clone(), initial, keep_final }
}

fn backward_run<'a, T>(
    own: &OwnRun,
    number: usize,
    saved: &'a Saved<T>,
    d_final: Option<&'a [T]>,
) -> DeltaBackwardRun<'a, T> {
    DeltaBackwardRun {
        run: own.run.clone(),
        initial: saved.initial[number].as_deref(),
        blocks: &saved.blocks[number],
        d_final,
        keep_initial: own.continues,
    }
}
