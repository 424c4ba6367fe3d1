//! Trained parameters in the order in which backward is through with them, in buckets whose gradients are summed over ranks
//! at a time.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Tensor, Var};
use candle_cp::comm::share;

use crate::error::Result;
use crate::optimizer::state_dtype;

/// Bytes of gradients from which on a bucket takes no further parameter: there has to be room for some copies of a bucket.
const BUCKET_BYTES: usize = 32 << 20;

/// Buckets that may be on their way between ranks at a time: one travels while the next is made, and the room for more would
/// be as large as all gradients.
pub(crate) const ON_THE_WAY: usize = 2;

/// Which elements of each parameter, as they lie in memory, are a rank's own; parameters of which it has none are left out.
pub type Owned = BTreeMap<String, Range<usize>>;

/// Parameters of one type, end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// Of the parameters.
    pub dtype: DType,
    /// The decoder layer whose parameters it has; `None` for what lies outside of the decoder layers.
    pub layer: Option<usize>,
    /// Name and place within the bucket.
    pub parameters: Vec<(String, Range<usize>)>,
    /// Elements of all parameters.
    pub count: usize,
}

impl Bucket {
    /// One tensor of all of them, `[count]`, in `dtype`, from the tensor of each; zeros where there is none.
    pub fn flat(
        &self,
        dtype: DType,
        device: &candle_core::Device,
        mut of: impl FnMut(&str) -> Option<Tensor>,
    ) -> Result<Tensor> {
        let tensors = self.parameters.iter().map(|(name, place)| match of(name) {
            Some(tensor) => tensor.flatten_all()?.to_dtype(dtype),
            None => Tensor::zeros(place.len(), dtype, device),
        });
        Ok(Tensor::cat(&tensors.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
    }

    /// The parts of parameters within some of the elements: name, elements of the parameter, place within `elements`.
    pub fn parts(&self, elements: Range<usize>) -> impl Iterator<Item = (&str, Range<usize>, Range<usize>)> {
        let Range { start: first, end: last } = elements;
        self.parameters.iter().filter_map(move |(name, place)| {
            let (start, end) = (place.start.max(first), place.end.min(last));
            (start < end).then(|| (name.as_str(), start - place.start..end - place.start, start - first..end - first))
        })
    }
}

/// All trained parameters, each in one bucket. The same on all ranks, as the parameters are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Buckets(Vec<Bucket>);

impl Buckets {
    /// Of these variables, see [`Buckets::of`].
    pub fn new(variables: &BTreeMap<String, Var>, layer_of: impl Fn(&str) -> Option<usize>) -> Self {
        let parameters = variables.iter().map(|(name, var)| (name.clone(), var.dtype(), var.elem_count()));
        Self::of(parameters.collect(), layer_of)
    }

    /// The last decoder layer first, and what lies outside of the layers last; `parameters` are names, types and elements,
    /// `layer_of` tells a parameter's layer by its name.
    pub fn of(parameters: Vec<(String, DType, usize)>, layer_of: impl Fn(&str) -> Option<usize>) -> Self {
        Self::of_size(parameters, layer_of, BUCKET_BYTES)
    }

    fn of_size(
        mut parameters: Vec<(String, DType, usize)>,
        layer_of: impl Fn(&str) -> Option<usize>,
        most: usize,
    ) -> Self {
        // By type before the name: types that alternate by name would make a bucket each.
        parameters.sort_by_cached_key(|(name, dtype, _)| (Reverse(layer_of(name)), dtype.as_str(), name.clone()));
        let mut buckets: Vec<Bucket> = Vec::new();
        for (name, dtype, count) in parameters {
            let layer = layer_of(&name);
            let room = |bucket: &&mut Bucket| {
                let bytes = bucket.count * state_dtype(dtype).size_in_bytes();
                bucket.dtype == dtype && bucket.layer == layer && bytes < most
            };
            let bucket = match buckets.last_mut().filter(room) {
                Some(bucket) => bucket,
                None => {
                    buckets.push(Bucket { dtype, layer, parameters: Vec::new(), count: 0 });
                    buckets.last_mut().expect("it was just made")
                }
            };
            bucket.parameters.push((name, bucket.count..bucket.count + count));
            bucket.count += count;
        }
        Self(buckets)
    }

    /// In the order of their sums.
    pub fn all(&self) -> &[Bucket] {
        &self.0
    }

    /// What a rank has of each parameter: its share of every bucket.
    pub fn owned(&self, size: usize, rank: usize) -> Owned {
        let of_bucket = |bucket: &Bucket| {
            let elements = share(bucket.count, size, rank);
            bucket.parts(elements).map(|(name, range, _)| (name.to_string(), range)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of_bucket).collect()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn parameters(sizes: &[(&str, usize, DType)]) -> Vec<(String, DType, usize)> {
        sizes.iter().map(|&(name, count, dtype)| (name.to_string(), dtype, count)).collect()
    }

    fn layer(name: &str) -> Option<usize> {
        name.strip_prefix("layer.")?.split('.').next()?.parse().ok()
    }

    fn names(buckets: &Buckets) -> Vec<(Option<usize>, Vec<&str>, usize)> {
        let of = |bucket| {
            let Bucket { layer, parameters, count, .. }: &Bucket = bucket;
            (*layer, parameters.iter().map(|(name, _)| name.as_str()).collect(), *count)
        };
        buckets.all().iter().map(of).collect()
    }

    #[test]
    fn layers_come_from_the_last_to_the_first_and_the_rest_at_the_end() {
        let f32 = |name, count| (name, count, DType::F32);
        let sizes = [f32("embed", 9), f32("layer.0.a", 2), f32("layer.0.b", 2), f32("layer.1.a", 3), f32("norm", 1)];
        let ten = f32("layer.10.a", 1);
        let all = parameters(&[&sizes[..], &[ten]].concat());
        let small = Buckets::of_size(all.clone(), layer, 1);
        let expected = [
            (Some(10), vec!["layer.10.a"], 1),
            (Some(1), vec!["layer.1.a"], 3),
            (Some(0), vec!["layer.0.a"], 2),
            (Some(0), vec!["layer.0.b"], 2),
            (None, vec!["embed"], 9),
            (None, vec!["norm"], 1),
        ];
        assert_eq!(names(&small), expected);
        // 36 bytes of the table are enough, 8 of the first parameter are not.
        let middle = Buckets::of_size(all.clone(), layer, 16);
        let expected = [
            (Some(10), vec!["layer.10.a"], 1),
            (Some(1), vec!["layer.1.a"], 3),
            (Some(0), vec!["layer.0.a", "layer.0.b"], 4),
            (None, vec!["embed"], 9),
            (None, vec!["norm"], 1),
        ];
        assert_eq!(names(&middle), expected);
        assert_eq!(Buckets::of(all, layer).all().len(), 4);
    }

    #[test]
    fn a_bucket_has_one_type() {
        let all =
            parameters(&[("a", 2, DType::BF16), ("b", 2, DType::F32), ("c", 3, DType::BF16), ("d", 5, DType::F32)]);
        // Also where types alternate by name there is one of each.
        let types: Vec<_> = Buckets::of(all, layer).all().iter().map(|b| (b.dtype, b.count)).collect();
        assert_eq!(types, [(DType::BF16, 5), (DType::F32, 7)]);
    }

    #[test]
    fn variables_are_told_by_their_types_and_sizes() {
        let var = Var::zeros((2, 3), DType::BF16, &Device::Cpu).unwrap();
        let found = Buckets::new(&BTreeMap::from([("layer.1.a".to_string(), var)]), layer);
        assert_eq!(found, Buckets::of(parameters(&[("layer.1.a", 6, DType::BF16)]), layer));
    }

    #[test]
    fn every_element_has_one_owner() {
        let all = parameters(&[
            ("a", 7, DType::F32),
            ("b", 1, DType::F32),
            ("layer.0.c", 5, DType::F32),
            ("d", 0, DType::F32),
        ]);
        for most in [1, 24, 1 << 20] {
            let buckets = Buckets::of_size(all.clone(), layer, most);
            for size in 1..=6 {
                let mut owners: BTreeMap<String, Vec<usize>> =
                    all.iter().map(|(name, _, count)| (name.clone(), vec![0; *count])).collect();
                for rank in 0..size {
                    for (name, range) in buckets.owned(size, rank) {
                        owners.get_mut(&name).unwrap()[range].iter_mut().for_each(|owners| *owners += 1);
                    }
                }
                assert!(owners.values().flatten().all(|&owners| owners == 1), "{size} ranks: {owners:?}");
            }
        }
    }
}
