//! What travels ahead of a tensor, so that ranks which are out of step notice.

use crate::comm::{Tag, Traffic};
use crate::error::{Error, Result};
use candle_core::DType;

/// Numbers of a header: 128 bytes.
pub const HEADER_LEN: usize = 16;
const MAX_RANK: usize = 8;
const MAGIC: u64 = 0x6361_6e64_6c65_4350;
const DTYPES: [DType; 7] = [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

/// Tag, type and shape of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub tag: Tag,
    pub dtype: DType,
    pub dims: Vec<usize>,
}

impl std::fmt::Display for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} with {:?} {:?}", self.tag, self.dtype, self.dims)
    }
}

impl Header {
    /// A header for a tensor that can be sent.
    ///
    /// # Errors
    /// [`Error::Argument`] for a type or a number of dimensions that cannot travel.
    pub fn new(tag: Tag, dtype: DType, dims: &[usize]) -> Result<Self> {
        if !DTYPES.contains(&dtype) {
            let allowed = format!("between processes travel {DTYPES:?}");
            return Err(Error::argument("dtype", format!("{dtype:?} in {tag}"), allowed, "convert the tensor first"));
        }
        if dims.len() > MAX_RANK {
            let allowed = format!("tensors of up to {MAX_RANK} dimensions travel");
            return Err(Error::argument("shape", format!("{dims:?} in {tag}"), allowed, "flatten the tensor first"));
        }
        Ok(Self { tag, dtype, dims: dims.to_vec() })
    }

    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size_in_bytes()
    }

    pub fn encode(&self) -> [u64; HEADER_LEN] {
        let place = |found: Option<usize>| found.expect("checked when made") as u64;
        let mut numbers = [0; HEADER_LEN];
        numbers[0] = MAGIC;
        numbers[1] = self.tag.traffic.index() as u64;
        numbers[2] = self.tag.call;
        numbers[3] = self.tag.step as u64;
        numbers[4] = place(DTYPES.iter().position(|&dtype| dtype == self.dtype));
        numbers[5] = self.dims.len() as u64;
        numbers[6..6 + self.dims.len()].iter_mut().zip(&self.dims).for_each(|(n, &d)| *n = d as u64);
        numbers
    }

    /// `None` if the numbers are no header: another message was matched with this one.
    pub fn decode(numbers: &[u64]) -> Option<Self> {
        let [MAGIC, kind, call, step, dtype, rank, dims @ ..] = numbers else { return None };
        let size = |&n: &u64| usize::try_from(n).ok();
        let tag = Tag { traffic: *Traffic::ALL.get(size(kind)?)?, call: *call, step: size(step)? };
        let dims = dims.get(..size(rank)?.min(MAX_RANK))?.iter().map(size).collect::<Option<Vec<_>>>()?;
        Some(Self { tag, dtype: *DTYPES.get(size(dtype)?)?, dims })
    }
}

/// What a rank says that another expects something else from it.
pub fn mismatch(rank: usize, peer: usize, tag: Tag, expected: impl ToString, sent: Option<&Header>) -> Error {
    Error::Mismatch {
        rank,
        operation: tag.to_string(),
        peer,
        expected: expected.to_string(),
        sent: sent.map_or("something that is not a header".to_string(), Header::to_string),
    }
}

/// The peer's header, if it has the tag, the type and (where one is expected) the shape.
///
/// # Errors
/// [`Error::Mismatch`].
pub fn checked(
    numbers: &[u64],
    (rank, peer): (usize, usize),
    (tag, dtype, dims): (Tag, DType, Option<&[usize]>),
) -> Result<Header> {
    match Header::decode(numbers) {
        Some(h) if h.tag == tag && h.dtype == dtype && dims.is_none_or(|dims| dims == h.dims) => Ok(h),
        other => {
            let shape = dims.map_or("of any shape".to_string(), |dims| format!("{dims:?}"));
            Err(mismatch(rank, peer, tag, format!("{tag} with {dtype:?} {shape}"), other.as_ref()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> Tag {
        Tag { traffic: Traffic::KeyValueGradient, call: u64::MAX, step: 7 }
    }

    #[test]
    fn headers_survive_the_way() {
        for traffic in Traffic::ALL {
            for dtype in DTYPES {
                for rank in 0..=MAX_RANK {
                    let dims: Vec<usize> = (0..rank).map(|i| i << 40).collect();
                    let header = Header::new(Tag { traffic, ..tag() }, dtype, &dims).unwrap();
                    assert_eq!(Header::decode(&header.encode()), Some(header));
                }
            }
        }
    }

    #[test]
    fn what_cannot_travel_is_refused() {
        let error = Header::new(tag(), DType::I16, &[2]).unwrap_err().to_string();
        assert!(error.contains("dtype is I16 in KeyValueGradient (call"), "{error}");
        assert!(Header::new(tag(), DType::F32, &[1; 9]).unwrap_err().to_string().contains("up to 8 dimensions"));
    }

    #[test]
    fn every_difference_is_a_mismatch() {
        let dims = [2, 3];
        let expected = (tag(), DType::F32, Some(&dims[..]));
        let sent = |header: Header| checked(&header.encode(), (1, 2), expected);
        let fits = Header::new(tag(), DType::F32, &dims).unwrap();
        assert_eq!(sent(fits.clone()).unwrap(), fits);
        for other in [
            Header { tag: Tag { call: 0, ..tag() }, ..fits.clone() },
            Header { tag: Tag { step: 6, ..tag() }, ..fits.clone() },
            Header { tag: Tag { traffic: Traffic::KeyValue, ..tag() }, ..fits.clone() },
            Header { dtype: DType::BF16, ..fits.clone() },
            Header { dims: vec![3, 2], ..fits.clone() },
            Header { dims: vec![6], ..fits.clone() },
        ] {
            let error = sent(other.clone()).unwrap_err().to_string();
            assert!(error.contains(&format!("from rank 2, which sent {other};")), "{error}");
            assert!(
                error.starts_with("rank 1: KeyValueGradient (call 18446744073709551615, step 7) expects"),
                "{error}"
            );
        }
        let any = (tag(), DType::F32, None);
        assert!(checked(&Header { dims: vec![9], ..fits.clone() }.encode(), (1, 2), any).is_ok());
        let mut garbage = fits.encode();
        garbage[0] += 1;
        assert!(checked(&garbage, (1, 2), any).unwrap_err().to_string().contains("something that is not a header"));
        assert!(checked(&[0; HEADER_LEN], (1, 2), any).is_err());
    }
}
