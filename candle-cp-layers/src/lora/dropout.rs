//! Dropout of an adapter's inputs.
//!
//! Whether a number is dropped is a function of seed, step, module, the token's place in the whole batch, and the
//! number's place in the token's row. So it does not matter how the batch is cut over ranks, and a layer that runs again
//! in backward drops the same numbers.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use candle_cp::{CpContext, with_backward};
use rayon::prelude::*;

use crate::fused::{Real, TASK, slice, with_real};
use crate::random::{mix, name_hash};

/// What is dropped in one step.
#[derive(Debug, Clone)]
pub struct DropoutStep {
    /// The share of numbers that is dropped.
    pub(crate) share: f64,
    pub(crate) seed: u64,
    pub(crate) step: u64,
    /// Places in the whole batch of this rank's tokens, row by row.
    pub(crate) tokens: Arc<[u64]>,
}

/// What one module drops in one step.
#[derive(Debug, Clone)]
pub struct Dropout {
    share: f64,
    key: u64,
    rows: Rows,
}

/// Which rows a module gets.
#[derive(Debug, Clone)]
enum Rows {
    /// All, on every rank.
    All,
    /// Those with these places in the whole batch.
    At(Arc<[u64]>),
}

impl DropoutStep {
    /// For the rows of this rank.
    pub fn new(share: f64, seed: u64, step: u64, context: &CpContext) -> Self {
        let indices = context.layout().global_indices(context.rank());
        // Not a multiple of the row's length, which layouts pad in different ways.
        let place = |row: usize, index: usize| ((row as u64) << 32) + index as u64;
        let batch = 0..context.tokens().batch();
        let tokens = batch.flat_map(|row| indices.iter().map(move |&index| place(row, index))).collect();
        Self { share, seed, step, tokens }
    }

    /// For the module of this path, which works on a rank's slice of the batch, or on all of its input on every rank.
    pub fn of_module(&self, path: &str, is_sliced: bool) -> Dropout {
        let rows = if is_sliced { Rows::At(self.tokens.clone()) } else { Rows::All };
        let key = mix(mix(self.seed ^ name_hash(path)).wrapping_add(self.step));
        Dropout { share: self.share, key, rows }
    }
}

impl Dropout {
    /// For a module that gets only the rows at these indices among those it was made for.
    pub fn select(&self, rows: &[u32]) -> Self {
        let places = rows.iter().map(|&row| match &self.rows {
            Rows::All => u64::from(row),
            Rows::At(places) => places[row as usize],
        });
        Self { rows: Rows::At(places.collect()), ..self.clone() }
    }

    /// `x`, in f32 or f64, has rows of `width` numbers. Those that are kept are scaled up.
    pub fn apply(&self, x: &Tensor, width: usize) -> Result<Tensor> {
        match x.device().is_cpu() {
            true => x.contiguous()?.apply_op1(Drop { dropout: self.clone(), width }),
            false => self.composed(x, width),
        }
    }

    /// By tensor operations: the host says what is kept, a byte for each number, which backward keeps.
    fn composed(&self, x: &Tensor, width: usize) -> Result<Tensor> {
        let kept = Tensor::from_vec(self.kept(x.elem_count(), width)?, x.shape(), x.device())?;
        let scale = self.scale();
        let drop = move |x: &Tensor| kept.where_cond(&(x * scale)?, &x.zeros_like()?);
        let y = drop(&x.detach())?;
        with_backward("adapter-dropout", [x], y, move |_, grad| Ok([Some(drop(grad)?)]))
    }

    /// The same on plain numbers.
    pub fn apply_to(&self, x: &CpuStorage, width: usize) -> Result<CpuStorage> {
        with_real!(x.dtype(), T => {
            let y = self.masked(x.as_slice::<T>()?, width)?;
            Ok(<T as WithDType>::to_cpu_storage_owned(y))
        })
    }

    fn masked<T: Real>(&self, x: &[T], width: usize) -> Result<Vec<T>> {
        self.check(x.len(), width)?;
        let rows_per_task = (TASK / width).max(1);
        let (task, scale) = (rows_per_task * width, T::from_f64(self.scale()));
        let mut y = vec![T::from_f64(0.0); x.len()];
        y.par_chunks_mut(task).zip(x.par_chunks(task)).enumerate().for_each(|(part, (y, x))| {
            for (row, (y, x)) in y.chunks_mut(width).zip(x.chunks(width)).enumerate() {
                let keeps = self.row(part * rows_per_task + row);
                for (column, (y, &x)) in y.iter_mut().zip(x).enumerate() {
                    if keeps(column) {
                        *y = x * scale;
                    }
                }
            }
        });
        Ok(y)
    }

    /// 1 for each of `count` numbers that is kept, 0 for the others.
    fn kept(&self, count: usize, width: usize) -> Result<Vec<u8>> {
        self.check(count, width)?;
        let mut kept = vec![0; count];
        kept.par_chunks_mut(width).enumerate().for_each(|(row, kept)| {
            let keeps = self.row(row);
            kept.iter_mut().enumerate().for_each(|(column, kept)| *kept = u8::from(keeps(column)));
        });
        Ok(kept)
    }

    fn check(&self, count: usize, width: usize) -> Result<()> {
        match &self.rows {
            Rows::At(places) if places.len() * width != count => {
                bail!("dropout for {} rows of another batch got {}", places.len(), count / width)
            }
            _ => Ok(()),
        }
    }

    /// On what is kept.
    fn scale(&self) -> f64 {
        1.0 / (1.0 - self.share)
    }

    /// Whether a row keeps its number in a column.
    #[inline(always)]
    fn row(&self, row: usize) -> impl Fn(usize) -> bool {
        let limit = (self.share * 2f64.powi(32)) as u64;
        let key = mix(self.key ^ mix(self.place(row)));
        move |column| mix(key.wrapping_add(column as u64)) >> 32 >= limit
    }

    fn place(&self, row: usize) -> u64 {
        match &self.rows {
            Rows::All => row as u64,
            Rows::At(places) => places[row],
        }
    }
}

/// The operator; it is its own backward.
#[derive(Clone)]
struct Drop {
    dropout: Dropout,
    width: usize,
}

impl CustomOp1 for Drop {
    fn name(&self) -> &'static str {
        "adapter-dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_real!(x.dtype(), T => {
            let y = self.dropout.masked(slice::<T>(x, layout)?, self.width)?;
            Ok((<T as WithDType>::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(grad.contiguous()?.apply_op1_no_bwd(self)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    fn step(share: f64, seed: u64, step: u64, tokens: &[u64]) -> DropoutStep {
        DropoutStep { share, seed, step, tokens: tokens.into() }
    }

    #[test]
    fn the_share_is_dropped_and_the_rest_scaled() -> Result<()> {
        let x = Tensor::ones((300, 200), DType::F64, &Device::Cpu)?;
        for share in [0.1, 0.5, 0.9] {
            let y = step(share, 1, 2, &[]).of_module("a", false).apply(&x, 200)?.flatten_all()?.to_vec1::<f64>()?;
            let kept: Vec<f64> = y.iter().copied().filter(|y| *y != 0.0).collect();
            assert!(kept.iter().all(|y| (y - 1.0 / (1.0 - share)).abs() < 1e-12));
            let found = 1.0 - kept.len() as f64 / y.len() as f64;
            assert!((found - share).abs() < 0.01, "{found} of {share}");
        }
        Ok(())
    }

    #[test]
    fn the_mask_depends_on_everything_it_should_and_on_places_only() -> Result<()> {
        let x = Tensor::ones((6, 64), DType::F32, &Device::Cpu)?;
        let mask = |dropout: Dropout, x: &Tensor| dropout.apply(x, 64)?.to_vec2::<f32>();
        let base = mask(step(0.5, 1, 1, &[]).of_module("a", false), &x)?;
        for other in [
            step(0.5, 2, 1, &[]).of_module("a", false),
            step(0.5, 1, 2, &[]).of_module("a", false),
            step(0.5, 1, 1, &[]).of_module("b", false),
        ] {
            let other = mask(other, &x)?;
            let equal = base.iter().flatten().zip(other.iter().flatten()).filter(|(a, b)| a == b).count();
            assert!((140..244).contains(&equal), "{equal} of 384");
        }
        assert_ne!(base[0], base[1]);
        let places = [4, 0, 5];
        let slice = mask(step(0.5, 1, 1, &places).of_module("a", true), &x.narrow(0, 0, 3)?)?;
        assert_eq!(slice, places.map(|place| base[place as usize].clone()));
        let selected = step(0.5, 1, 1, &places).of_module("a", true).select(&[2, 0]);
        assert_eq!(mask(selected, &x.narrow(0, 0, 2)?)?, [base[5].clone(), base[4].clone()]);
        let all = step(0.5, 1, 1, &[]).of_module("a", false).select(&[3]);
        assert_eq!(mask(all, &x.narrow(0, 0, 1)?)?, [base[3].clone()]);
        let wrong = step(0.5, 1, 1, &places).of_module("a", true).apply(&x, 64).unwrap_err().to_string();
        assert!(wrong.contains("dropout for 3 rows of another batch got 6"), "{wrong}");
        Ok(())
    }

    #[test]
    fn gradients_go_where_values_went() -> Result<()> {
        let x = Var::from_tensor(&Tensor::ones((5, 7), DType::F32, &Device::Cpu)?)?;
        let dropout = step(0.4, 3, 1, &[]).of_module("a", false);
        let y = dropout.apply(&x, 7)?;
        for y in [&y, &dropout.composed(&x, 7)?] {
            let gradients = y.sum_all()?.backward()?;
            assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?, y.to_vec2::<f32>()?);
        }
        assert_eq!(dropout.composed(&x, 7)?.to_vec2::<f32>()?, y.to_vec2::<f32>()?);
        let nan = (x.as_tensor() * f64::NAN)?;
        let dropped =
            |y: Tensor| Ok::<_, candle_core::Error>(y.to_vec2::<f32>()?.concat().iter().filter(|y| **y == 0.0).count());
        assert_eq!(dropped(dropout.composed(&nan, 7)?)?, dropped(y)?);
        Ok(())
    }
}
