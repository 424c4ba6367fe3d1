//! Where a picture comes from.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};

use super::{Picture, PictureLimits};
use crate::error::PictureFault;

/// Where a picture comes from. Cheap to clone where it holds bytes or pixels.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PictureSource {
    /// A file; a relative path counts from the folder of the request.
    Path(PathBuf),
    /// The content of a PNG or JPEG file, with a name for errors.
    Bytes(String, Arc<[u8]>),
    /// Base64 text, with or without `data:image/...;base64,` before it.
    Base64(Arc<str>),
    /// A web address. Loading it fails: nothing is fetched from the network.
    WebAddress(String),
    /// A decoded picture, with a name for errors.
    Decoded(String, Arc<Picture>),
}

/// Both alphabets, with and without padding: what people paste.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

impl PictureSource {
    /// What a text in an `image`, `url` or `path` field of a message means: a `data:` URL, a web address, a `file://`
    /// address, base64 of a PNG or JPEG, else a path.
    pub fn from_text(text: &str) -> Self {
        let scheme_is = |scheme: &str| text.get(..scheme.len()).is_some_and(|s| s.eq_ignore_ascii_case(scheme));
        if scheme_is("data:") || is_bare_base64(text) {
            Self::Base64(text.into())
        } else if scheme_is("http://") || scheme_is("https://") {
            Self::WebAddress(text.into())
        } else if scheme_is("file://") {
            Self::Path(PathBuf::from(&text["file://".len()..]))
        } else {
            Self::Path(PathBuf::from(text))
        }
    }

    /// A name for errors: the path, or a short description.
    pub fn name(&self) -> String {
        match self {
            Self::Path(path) => path.display().to_string(),
            Self::Bytes(name, _) | Self::Decoded(name, _) => name.clone(),
            Self::WebAddress(address) => address.clone(),
            Self::Base64(text) => {
                let head: String = text.chars().take(24).collect();
                format!("base64 text of {} characters, {head}...", text.len())
            }
        }
    }

    /// Loads and decodes the picture; `folder` is where relative paths start.
    ///
    /// # Errors
    /// The file cannot be read, the text is not base64, or the content is no usable picture.
    pub fn load(&self, folder: &Path, limits: &PictureLimits) -> Result<Arc<Picture>, PictureFault> {
        let picture = match self {
            Self::Path(path) => Picture::decode(&read(&folder.join(path), limits)?, limits)?,
            Self::Bytes(_, content) => Picture::decode(content, limits)?,
            Self::Base64(text) => Picture::decode(&decode_base64(text)?, limits)?,
            Self::WebAddress(_) => return Err(PictureFault::WebAddress),
            Self::Decoded(_, picture) => return Ok(picture.clone()),
        };
        Ok(Arc::new(picture))
    }
}

/// Base64 of the first bytes of a PNG or JPEG file; no sensible path starts so and is this long.
fn is_bare_base64(text: &str) -> bool {
    text.len() >= 64 && (text.starts_with("iVBORw0KGgo") || text.starts_with("/9j/"))
}

fn read(path: &Path, limits: &PictureLimits) -> Result<Vec<u8>, PictureFault> {
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(std::io::Error::other("it is no regular file").into()); // a pipe could block for ever
    }
    let bytes = found.len();
    if bytes > limits.max_bytes {
        return Err(PictureFault::TooManyBytes { bytes, max_bytes: limits.max_bytes });
    }
    let mut content = Vec::with_capacity(bytes as usize);
    File::open(path)?.take(limits.max_bytes + 1).read_to_end(&mut content)?;
    Ok(content)
}

/// Blanks and line breaks are skipped, the URL-safe alphabet is read as well, padding may lack.
fn decode_base64(text: &str) -> Result<Vec<u8>, PictureFault> {
    let is_url = text.get(..5).is_some_and(|s| s.eq_ignore_ascii_case("data:"));
    let body = match text.split_once(',') {
        Some((head, body)) if is_url && head.trim_end().to_ascii_lowercase().ends_with(";base64") => body,
        _ if is_url => return Err(PictureFault::DataUrl),
        _ => text,
    };
    let start = text.len() - body.len();
    let mut symbols = Vec::with_capacity(body.len());
    for (at, byte) in body.bytes().enumerate() {
        match byte {
            b'-' => symbols.push(b'+'),
            b'_' => symbols.push(b'/'),
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'+' | b'/' | b'=' => symbols.push(byte),
            _ if byte.is_ascii_whitespace() => {}
            _ => {
                let found = body[..at].chars().count();
                let symbol = body[at..].chars().next().unwrap_or('?');
                return Err(PictureFault::Base64(format!("{symbol:?} at character {}", start + found + 1)));
            }
        }
    }
    LENIENT.decode(&symbols).map_err(|e| PictureFault::Base64(e.to_string()))
}
