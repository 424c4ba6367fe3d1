//! Tells sets of samples apart.

use ring::digest::{Context, SHA256};

use super::Lines;

impl Lines {
    /// SHA-256, in hexadecimal digits, of the tokens of all samples, in order, and of which of them are learned.
    pub fn fingerprint(&self) -> String {
        let mut context = Context::new(&SHA256);
        for line in &self.samples {
            context.update(&(line.encoded.tokens.len() as u64).to_le_bytes());
            for token in &line.encoded.tokens {
                context.update(&token.id.to_le_bytes());
                context.update(&[u8::from(token.learned.is_some())]);
            }
        }
        context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
