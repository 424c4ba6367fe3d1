//! The framing of TFRecord files: length, its checksum, bytes, their checksum.

/// Added to a rotated checksum, so that a checksum over bytes that hold checksums stays sound.
const MASK_DELTA: u32 = 0xa282_ead8;

/// One record: `u64` length, `u32` masked checksum of the length, the bytes, `u32` masked checksum of the bytes; all
/// little-endian.
pub fn frame(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(bytes.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked(&length));
    record.extend_from_slice(bytes);
    record.extend_from_slice(&masked(bytes));
    record
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA).to_le_bytes()
}
