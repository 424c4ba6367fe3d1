//! The three kinds of `tensorboard.Event` that a run needs, as protocol buffers. Fields whose value is the default are left
//! out, as the format has it, but for members of a `oneof`.

/// How a field's value is laid out.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

/// The fields of `Event`, `Summary`, `Summary.Value` and `SessionLog` in use.
mod field {
    pub const WALL_TIME: u32 = 1;
    pub const STEP: u32 = 2;
    pub const FILE_VERSION: u32 = 3;
    pub const SUMMARY: u32 = 5;
    pub const SESSION_LOG: u32 = 7;
    pub const VALUE: u32 = 1;
    pub const TAG: u32 = 1;
    pub const SIMPLE_VALUE: u32 = 2;
    pub const STATUS: u32 = 1;
}

/// `SessionLog.START`.
const START: u64 = 1;

/// The first event of a file.
pub fn version(wall_time: f64) -> Vec<u8> {
    let mut event = event(wall_time, 0);
    put_bytes(&mut event, field::FILE_VERSION, b"brain.Event:2");
    event
}

/// Says that steps from `step` on begin anew.
pub fn session_start(wall_time: f64, step: usize) -> Vec<u8> {
    let (mut event, mut log) = (event(wall_time, step), Vec::new());
    put_key(&mut log, field::STATUS, Wire::Varint);
    put_varint(&mut log, START);
    put_bytes(&mut event, field::SESSION_LOG, &log);
    event
}

/// Numbers of a step, in f32.
pub fn scalars(wall_time: f64, step: usize, scalars: &[(&str, f64)]) -> Vec<u8> {
    let (mut event, mut summary) = (event(wall_time, step), Vec::new());
    for (tag, number) in scalars {
        let mut value = Vec::new();
        if !tag.is_empty() {
            put_bytes(&mut value, field::TAG, tag.as_bytes());
        }
        put_key(&mut value, field::SIMPLE_VALUE, Wire::Fixed32);
        value.extend_from_slice(&(*number as f32).to_le_bytes());
        put_bytes(&mut summary, field::VALUE, &value);
    }
    put_bytes(&mut event, field::SUMMARY, &summary);
    event
}

fn event(wall_time: f64, step: usize) -> Vec<u8> {
    let mut event = Vec::new();
    if wall_time != 0.0 {
        put_key(&mut event, field::WALL_TIME, Wire::Fixed64);
        event.extend_from_slice(&wall_time.to_le_bytes());
    }
    if step != 0 {
        put_key(&mut event, field::STEP, Wire::Varint);
        put_varint(&mut event, step as u64);
    }
    event
}

fn put_bytes(message: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    put_key(message, field, Wire::Bytes);
    put_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

fn put_key(message: &mut Vec<u8>, field: u32, wire: Wire) {
    put_varint(message, u64::from(field << 3 | wire as u32));
}

/// Seven bits a byte, the low ones first; the high bit says that more follow.
fn put_varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}
