//! Case files: named tensors of one input (`input.*`) and of the results to compare with.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};

/// Inputs that a run reads. Every other `input.*` tensor is either derived here and compared, or reported as unused.
pub const GIVEN: [&str; 9] = [
    "input.input_ids",
    "input.labels",
    "input.attention_mask",
    "input.doc_ids",
    "input.pixel_values",
    "input.image_position_ids",
    "input.image_grid_thw",
    "input.input_features",
    "input.input_features_mask",
];

/// Named tensors in name order, as read from a file or computed.
pub type Tensors = BTreeMap<String, Tensor>;

/// Integers per row, `[B][S]`.
pub type Rows = Vec<Vec<i64>>;

/// Reads all tensors of a safetensors file to the CPU.
///
/// # Errors
/// A file that cannot be read, is not in the format, or holds a data type that Candle does not know.
pub fn read_tensors(path: &Path) -> Result<Tensors> {
    let loaded = candle_core::safetensors::load(path, &Device::Cpu)
        .with_context(|| format!("cannot read the tensors of {}", path.display()))?;
    Ok(loaded.into_iter().collect())
}

/// Writes tensors to a safetensors file.
///
/// # Errors
/// A path that cannot be written.
pub fn write_tensors(path: &Path, tensors: &Tensors) -> Result<()> {
    let by_name: std::collections::HashMap<&str, Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    candle_core::safetensors::save(&by_name, path).with_context(|| format!("cannot write {}", path.display()))
}

/// Integer rows of a `[B, S]` tensor of any integer type.
///
/// # Errors
/// Another rank than 2, or a floating-point tensor.
pub fn integer_rows(name: &str, tensor: &Tensor) -> Result<Rows> {
    if tensor.rank() != 2 || tensor.dtype().is_float() {
        bail!("{name} is {:?} {:?}; allowed is an integer tensor [B, S]", tensor.dtype(), tensor.dims());
    }
    Ok(tensor.to_dtype(DType::I64)?.to_vec2()?)
}

/// One model case: the tensors of a file, and typed access to its inputs.
pub struct Case {
    tensors: Tensors,
}

impl Case {
    /// Reads a case file.
    ///
    /// # Errors
    /// An unreadable file, or one without `input.input_ids`.
    pub fn load(path: &Path) -> Result<Self> {
        Self::new(read_tensors(path)?).with_context(|| format!("{} is not a model case", path.display()))
    }

    /// A case of tensors already in memory, under the names of a case file.
    ///
    /// # Errors
    /// No `input.input_ids`.
    pub fn new(tensors: Tensors) -> Result<Self> {
        if !tensors.contains_key("input.input_ids") {
            let names: Vec<&str> = tensors.keys().map(String::as_str).take(5).collect();
            bail!(
                "there is no tensor `input.input_ids` (the file starts with: {}); a model case needs the token ids \
                 [B, S] under that name, an attention case is read with --attention",
                names.join(", ")
            );
        }
        Ok(Self { tensors })
    }

    /// All tensors of the file.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The tensor `name`, if the file has it.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The inputs that a run reads, as they are in the file.
    pub fn given(&self) -> Tensors {
        GIVEN.iter().filter_map(|&name| self.get(name).map(|x| (name.to_string(), x.clone()))).collect()
    }

    /// Token ids `[B][S]`, all in the range of u32.
    ///
    /// # Errors
    /// Another shape or type, or an id that is negative or too large.
    pub fn ids(&self) -> Result<Vec<Vec<u32>>> {
        let rows = self.rows("input.input_ids")?.context("input.input_ids is missing")?;
        let to_id = |id: i64| u32::try_from(id).with_context(|| format!("input.input_ids holds {id}, not a token id"));
        rows.into_iter().map(|row| row.into_iter().map(to_id).collect()).collect()
    }

    /// Integer rows `[B][S]` of an optional input, checked against the shape of the ids.
    ///
    /// # Errors
    /// Another shape or type.
    pub fn rows(&self, name: &str) -> Result<Option<Rows>> {
        let Some(tensor) = self.get(name) else { return Ok(None) };
        let rows = integer_rows(name, tensor)?;
        let ids = self.tensors["input.input_ids"].dims();
        if tensor.dims() != ids {
            bail!("{name} is {:?}; allowed is the shape of input.input_ids, {ids:?}", tensor.dims());
        }
        Ok(Some(rows))
    }

    /// Which tokens are real, `[B][S]`: `input.attention_mask`, or all of them without one.
    ///
    /// # Errors
    /// As [`Case::rows`]; entries other than 0 and 1.
    pub fn real_tokens(&self) -> Result<Vec<Vec<bool>>> {
        let name = "input.attention_mask";
        let Some(mask) = self.rows(name)? else {
            return Ok(self.ids()?.iter().map(|row| vec![true; row.len()]).collect());
        };
        if let Some(other) = mask.iter().flatten().find(|&&m| m != 0 && m != 1) {
            bail!("{name} holds {other}; allowed is 1 (real token) and 0 (padding)");
        }
        Ok(mask.iter().map(|row| row.iter().map(|&m| m == 1).collect()).collect())
    }

    /// Document of every token `[B][S]`, −1 for padding: `input.doc_ids` where there is one, else one document a row;
    /// `input.attention_mask` says which tokens are padding.
    ///
    /// # Errors
    /// As [`Case::real_tokens`].
    pub fn documents(&self) -> Result<Rows> {
        let real = self.real_tokens()?;
        let ids = match self.rows("input.doc_ids")? {
            Some(documents) => documents,
            None => real.iter().map(|row| vec![0; row.len()]).collect(),
        };
        let row = |(ids, real): (&Vec<i64>, &Vec<bool>)| {
            ids.iter().zip(real).map(|(&id, &real)| if real { id } else { -1 }).collect()
        };
        Ok(ids.iter().zip(&real).map(row).collect())
    }
}
