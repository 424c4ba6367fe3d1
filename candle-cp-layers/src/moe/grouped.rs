//! Matrix products per expert, on the CPU: one for every expert that has rows.
//!
//! Two operators, each the other's backward: [`Gather`] takes rows to assignments, [`Scatter`] takes assignments to rows
//! and adds up what belongs to one row. Their weights are stacked `[experts, ..]`, and so are the weights' gradients:
//! every expert's is written to its place in one buffer.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, WithDType, bail};

use super::Dispatch;
use super::dispatch::Group;
use crate::norm::wide;

/// `[rows, inputs]` and `[experts, outputs, inputs]` to `[assignments, outputs]`.
pub(super) struct Gather {
    dispatch: Arc<Dispatch>,
    side: Side,
}

/// `[assignments, inputs]` and `[experts, outputs, inputs]` to `[rows, outputs]`: sums over a row's assignments, formed
/// in f32 (f64 for f64) in the order of experts; 0 for a row that has none.
pub(super) struct Scatter {
    dispatch: Arc<Dispatch>,
    side: Side,
}

/// How an expert's matrix is laid out.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    /// `[outputs, inputs]`
    OutputsFirst,
    /// `[inputs, outputs]`
    InputsFirst,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Side::OutputsFirst => Side::InputsFirst,
            Side::InputsFirst => Side::OutputsFirst,
        }
    }
}

impl Gather {
    pub(super) fn new(dispatch: &Arc<Dispatch>) -> Self {
        Self { dispatch: dispatch.clone(), side: Side::OutputsFirst }
    }
}

impl Scatter {
    pub(super) fn new(dispatch: &Arc<Dispatch>) -> Self {
        Self { dispatch: dispatch.clone(), side: Side::OutputsFirst }
    }
}

impl CustomOp2 for Gather {
    fn name(&self) -> &'static str {
        "gather-to-experts"
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, w: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        let matrices = Matrices::new(w, lw, self.side)?;
        let rows = Rows::new(x, lx, &self.dispatch)?;
        let shape = Shape::from((self.dispatch.len(), matrices.outputs));
        let mut y = CpuDevice.zeros_impl(&shape, x.dtype())?;
        for group in &self.dispatch.groups {
            let part = matrices.product(&rows.gathered(group)?, group.range.len(), 0, group.expert)?;
            write(&part, group.range.len() * matrices.outputs, &mut y, group.range.start * matrices.outputs)?;
        }
        Ok((y, shape))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let dispatch = self.dispatch.clone();
        let x_grad = grad.apply_op2_no_bwd(w, &Scatter { dispatch: dispatch.clone(), side: self.side.other() })?;
        let assignments_first = self.side == Side::OutputsFirst;
        let weight_gradient = || grad.apply_op2_no_bwd(x, &WeightGradient { dispatch, assignments_first });
        Ok((Some(x_grad), w.track_op().then(weight_gradient).transpose()?))
    }
}

impl CustomOp2 for Scatter {
    fn name(&self) -> &'static str {
        "scatter-from-experts"
    }

    fn cpu_fwd(&self, x: &CpuStorage, lx: &Layout, w: &CpuStorage, lw: &Layout) -> Result<(CpuStorage, Shape)> {
        let matrices = Matrices::new(w, lw, self.side)?;
        let (start, _) = contiguous(lx)?;
        let shape = Shape::from((self.dispatch.rows, matrices.outputs));
        let sums_dtype = wide(x.dtype());
        let mut sums = CpuDevice.zeros_impl(&shape, sums_dtype)?;
        for group in &self.dispatch.groups {
            let from = start + group.range.start * matrices.inputs;
            let part = matrices.product(x, group.range.len(), from, group.expert)?;
            let part = cast(part, group.range.len() * matrices.outputs, sums_dtype)?;
            let rows = &self.dispatch.row[group.range.clone()];
            match (&mut sums, &part) {
                (CpuStorage::F32(sums), CpuStorage::F32(part)) => add_rows(sums, part, rows, matrices.outputs),
                (CpuStorage::F64(sums), CpuStorage::F64(part)) => add_rows(sums, part, rows, matrices.outputs),
                _ => bail!("sums are formed in f32 and f64"),
            }
        }
        Ok((cast(sums, shape.elem_count(), x.dtype())?, shape))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let dispatch = self.dispatch.clone();
        let x_grad = grad.apply_op2_no_bwd(w, &Gather { dispatch: dispatch.clone(), side: self.side.other() })?;
        let assignments_first = self.side == Side::InputsFirst;
        let weight_gradient = || x.apply_op2_no_bwd(&grad, &WeightGradient { dispatch, assignments_first });
        Ok((Some(x_grad), w.track_op().then(weight_gradient).transpose()?))
    }
}

/// `[assignments, m]` and `[rows, n]` to the sums of outer products per expert, `[experts, m, n]` or `[experts, n, m]`;
/// 0 for an expert without rows.
struct WeightGradient {
    dispatch: Arc<Dispatch>,
    assignments_first: bool,
}

impl CustomOp2 for WeightGradient {
    fn name(&self) -> &'static str {
        "expert-weight-gradient"
    }

    fn cpu_fwd(&self, a: &CpuStorage, la: &Layout, x: &CpuStorage, lx: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = Rows::new(x, lx, &self.dispatch)?;
        let (start, _) = contiguous(la)?;
        let (_, a_width) = la.shape().dims2()?;
        let (outer, inner) = if self.assignments_first { (a_width, rows.width) } else { (rows.width, a_width) };
        let shape = Shape::from((self.dispatch.experts, outer, inner));
        let mut gradient = CpuDevice.zeros_impl(&shape, a.dtype())?;
        for group in &self.dispatch.groups {
            let count = group.range.len();
            let a_layout = Layout::contiguous_with_offset((count, a_width), start + group.range.start * a_width);
            let (a, a_layout) = computable(a, a_layout)?;
            let (x, x_layout) = (rows.gathered(group)?, Layout::contiguous((count, rows.width)));
            let (x, x_layout) = computable(&x, x_layout)?;
            let (left, left_layout, right, right_layout) = match self.assignments_first {
                true => (a, a_layout, x, x_layout),
                false => (x, x_layout, a, a_layout),
            };
            let part = left.matmul(&right, (1, outer, inner, count), &left_layout.transpose(0, 1)?, &right_layout)?;
            write(&part, outer * inner, &mut gradient, group.expert * outer * inner)?;
        }
        Ok((gradient, shape))
    }
}

/// Rows that are looked up by assignment.
struct Rows<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
    width: usize,
    row: CpuStorage,
}

impl<'a> Rows<'a> {
    fn new(storage: &'a CpuStorage, layout: &'a Layout, dispatch: &Dispatch) -> Result<Self> {
        contiguous(layout)?;
        let (rows, width) = layout.shape().dims2()?;
        if rows != dispatch.rows {
            bail!("{rows} rows given, {} dispatched", dispatch.rows);
        }
        Ok(Self { storage, layout, width, row: CpuStorage::U32(dispatch.row.clone()) })
    }

    /// One expert's rows, `[rows of the group, width]`.
    fn gathered(&self, group: &Group) -> Result<CpuStorage> {
        let ids = Layout::contiguous_with_offset(group.range.len(), group.range.start);
        self.storage.index_select(&self.row, self.layout, &ids, 0)
    }
}

/// The stacked weights.
struct Matrices<'a> {
    storage: &'a CpuStorage,
    start: usize,
    side: Side,
    inputs: usize,
    outputs: usize,
}

impl<'a> Matrices<'a> {
    fn new(storage: &'a CpuStorage, layout: &Layout, side: Side) -> Result<Self> {
        let (start, _) = contiguous(layout)?;
        let (_, outer, inner) = layout.shape().dims3()?;
        let (outputs, inputs) = if side == Side::OutputsFirst { (outer, inner) } else { (inner, outer) };
        Ok(Self { storage, start, side, inputs, outputs })
    }

    /// `count` rows of `x`, which start at its number `from`, times the matrix of an expert: `[count, outputs]`.
    fn product(&self, x: &CpuStorage, count: usize, from: usize, expert: usize) -> Result<CpuStorage> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let offset = self.start + expert * inputs * outputs;
        let (w, w_layout) = match self.side {
            Side::OutputsFirst => {
                let (w, layout) = computable(self.storage, Layout::contiguous_with_offset((outputs, inputs), offset))?;
                (w, layout.transpose(0, 1)?)
            }
            Side::InputsFirst => computable(self.storage, Layout::contiguous_with_offset((inputs, outputs), offset))?,
        };
        let (x, x_layout) = computable(x, Layout::contiguous_with_offset((count, inputs), from))?;
        x.matmul(&w, (1, count, outputs, inputs), &x_layout, &w_layout)
    }
}

/// Start and end of a contiguous operand.
fn contiguous(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(offsets) => Ok(offsets),
        None => bail!("products per expert need contiguous operands"),
    }
}

/// A contiguous operand in a type that Candle multiplies on the CPU: it has no product of bf16.
fn computable(x: &CpuStorage, layout: Layout) -> Result<(Cow<'_, CpuStorage>, Layout)> {
    match x.dtype() {
        DType::BF16 => {
            let widened = x.to_dtype(&layout, DType::F32)?;
            Ok((Cow::Owned(widened), Layout::contiguous(layout.shape().clone())))
        }
        _ => Ok((Cow::Borrowed(x), layout)),
    }
}

/// The `count` numbers of a storage in another type.
fn cast(x: CpuStorage, count: usize, dtype: DType) -> Result<CpuStorage> {
    match x.dtype() == dtype {
        true => Ok(x),
        false => x.to_dtype(&Layout::contiguous(count), dtype),
    }
}

/// Puts the `count` numbers of `part` into `whole`, from its number `at` on.
fn write(part: &CpuStorage, count: usize, whole: &mut CpuStorage, at: usize) -> Result<()> {
    let layout = Layout::contiguous(count);
    match part.dtype() == whole.dtype() {
        true => part.copy_strided_src(whole, at, &layout),
        false => part.to_dtype(&layout, whole.dtype())?.copy_strided_src(whole, at, &layout),
    }
}

fn add_rows<T: WithDType>(sums: &mut [T], part: &[T], rows: &[u32], width: usize) {
    for (part, &row) in part.chunks_exact(width).zip(rows) {
        let sums = &mut sums[row as usize * width..][..width];
        sums.iter_mut().zip(part).for_each(|(sum, &value)| *sum += value);
    }
}
