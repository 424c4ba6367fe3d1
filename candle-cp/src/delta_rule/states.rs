//! States and their gradients on their way between pieces: one exchange in each direction, then every rank composes what
//! it needs.

use super::plan::{Link, StatePlan};
use crate::comm::{Communicator, Traffic};
use crate::error::Result;
use candle_core::{Device, Tensor, WithDType};
use candle_cp_kernels::DeltaHeads;

/// Something per (piece, row).
pub(super) type Places<T> = Vec<Vec<Option<T>>>;

fn nothing<T>(plan: &StatePlan) -> Places<T> {
    plan.links.iter().map(|rows| rows.iter().map(|_| None).collect()).collect()
}

/// The maps of all pieces: the state after one is `transition . before + state`.
pub(super) struct Maps {
    /// `[Hv, dk, dv]`, wherever a document goes on.
    states: Places<Tensor>,
    /// `[Hv, dk, dk]`, wherever a document passes through.
    transitions: Places<Tensor>,
}

/// Matrices that this rank made, each with its (piece, row).
pub(super) type Made<T> = Vec<((usize, usize), Vec<T>)>;

/// Where matrices are made: (piece, row), and the columns of each in the order in which they are sent.
type Sized = ((usize, usize), Vec<usize>);

/// One gathering of what every rank made at its places: `made` gives the matrix with a number at a place, `[Hv, dk, columns]`.
/// The result has the matrices of each place.
fn gather<T: WithDType>(
    comm: &dyn Communicator,
    plan: &StatePlan,
    traffic: Traffic,
    (heads, places): (&DeltaHeads, &[Sized]),
    mut made: impl FnMut((usize, usize), usize) -> Vec<T>,
) -> Result<Vec<Vec<Tensor>>> {
    let mut own = Vec::new();
    for (place, sizes) in places {
        if plan.owners[place.0] == comm.rank() {
            (0..sizes.len()).for_each(|which| own.extend(made(*place, which)));
        }
    }
    let length = own.len();
    let all = comm.all_gather_uneven(&Tensor::from_vec(own, length, &Device::Cpu)?, 0, traffic)?;
    let mut next = vec![0; all.len()];
    let mut found = Vec::with_capacity(places.len());
    for (place, sizes) in places {
        let owner = plan.owners[place.0];
        let mut of_place = Vec::with_capacity(sizes.len());
        for &columns in sizes {
            let length = heads.value_heads * heads.key_dim * columns;
            let matrix = all[owner].narrow(0, next[owner], length)?;
            of_place.push(matrix.reshape((heads.value_heads, heads.key_dim, columns))?);
            next[owner] += length;
        }
        found.push(of_place);
    }
    Ok(found)
}

impl Maps {
    /// Exchanges what the ranks' pieces do to the state. Every rank calls it.
    pub fn exchange<T: WithDType>(
        comm: &dyn Communicator,
        plan: &StatePlan,
        heads: &DeltaHeads,
        (mut own_states, mut own_transitions): (Made<T>, Made<T>),
    ) -> Result<Self> {
        let sizes = |link: Link| match link.through {
            true => vec![heads.value_dim, heads.key_dim],
            false => vec![heads.value_dim],
        };
        let places: Vec<_> = plan.places(|link| link.carries).collect();
        let sized: Vec<_> = places.iter().map(|&(piece, row)| ((piece, row), sizes(plan.links[piece][row]))).collect();
        let found = gather(comm, plan, Traffic::State, (heads, &sized), |place, which| {
            take(if which == 0 { &mut own_states } else { &mut own_transitions }, place)
        })?;
        let mut maps = Self { states: nothing(plan), transitions: nothing(plan) };
        for ((piece, row), found) in places.into_iter().zip(found) {
            let mut found = found.into_iter();
            maps.states[piece][row] = found.next();
            maps.transitions[piece][row] = found.next();
        }
        Ok(maps)
    }

    /// The states before this rank's pieces, `[Hv, dk, dv]`, where a document continues.
    pub fn initial(&self, plan: &StatePlan) -> Result<Places<Tensor>> {
        let needed = plan.needed_states();
        let mut initial = nothing(plan);
        for row in 0..plan.batch {
            let mut before: Option<Tensor> = None;
            for piece in 0..plan.owners.len() {
                initial[piece][row] = before.take();
                if needed[piece][row] {
                    let state = self.states[piece][row].clone().expect("a document goes on");
                    before = Some(match (&self.transitions[piece][row], &initial[piece][row]) {
                        (Some(transition), Some(before)) => (transition.matmul(before)? + state)?,
                        _ => state,
                    });
                }
            }
        }
        Ok(initial)
    }

    /// The transitions that backward needs on this rank.
    pub fn into_transitions(self, plan: &StatePlan) -> Result<Places<Tensor>> {
        let needed = plan.needed_gradients();
        let mut transitions = self.transitions;
        for (rows, needed) in transitions.iter_mut().zip(&needed) {
            for (transition, needed) in rows.iter_mut().zip(needed) {
                // In storage of its own: a view, or a plain copy of one, would keep the whole message alive.
                let kept = transition.take().filter(|_| *needed);
                *transition = kept.map(|kept| kept.force_contiguous()).transpose()?;
            }
        }
        Ok(transitions)
    }
}

/// Exchanges the gradients of the states before the ranks' pieces, as far as they come from the pieces' own outputs, and
/// composes those of the states after this rank's pieces, `[Hv, dk, dv]`. Every rank calls it.
pub(super) fn final_gradients<T: WithDType>(
    comm: &dyn Communicator,
    plan: &StatePlan,
    heads: &DeltaHeads,
    transitions: &Places<Tensor>,
    mut own: Made<T>,
) -> Result<Places<Tensor>> {
    let places: Vec<_> = plan.places(|link| link.continues).map(|place| (place, vec![heads.value_dim])).collect();
    let found = gather(comm, plan, Traffic::StateGradient, (heads, &places), |place, _| take(&mut own, place))?;
    let mut gradients = nothing(plan);
    for (((piece, row), _), found) in places.into_iter().zip(found) {
        gradients[piece][row] = found.into_iter().next();
    }
    let needed = plan.needed_gradients();
    let mut finals = nothing(plan);
    for row in 0..plan.batch {
        let mut after: Option<Tensor> = None;
        for piece in (0..plan.owners.len()).rev() {
            finals[piece][row] = after.take();
            if needed[piece][row] {
                let gradient = gradients[piece][row].clone().expect("a document continues");
                after = Some(match (&transitions[piece][row], &finals[piece][row]) {
                    (Some(transition), Some(after)) => (transition.transpose(1, 2)?.matmul(after)? + gradient)?,
                    _ => gradient,
                });
            }
        }
    }
    Ok(finals)
}

fn take<T>(made: &mut Made<T>, place: (usize, usize)) -> Vec<T> {
    let at = made.iter().position(|(of, _)| *of == place).expect("this rank made it");
    made.swap_remove(at).1
}
