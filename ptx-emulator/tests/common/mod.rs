//! Small kernels around a few lines of PTX.
#![allow(dead_code, reason = "each test file uses a part of this")]

use ptx_emulator::{CopyLanding, Fault, Launch, Memory, Module};

/// A module with one kernel `k`; `params` and `body` as in PTX.
pub fn module(params: &str, body: &str) -> String {
    format!(".version 8.4\n.target sm_80\n.address_size 64\n.visible .entry k({params})\n{{\n{body}\n\tret;\n}}\n")
}

/// Runs the kernel `k` of a module with `threads` threads in one block; 64-bit parameters.
pub fn launch(
    text: &str,
    memory: &mut Memory,
    threads: u32,
    shared_bytes: u32,
    params: &[u64],
    copies: CopyLanding,
) -> Result<(), Fault> {
    let module = Module::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let params: Vec<u8> = params.iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch { kernel: "k", grid: [1; 3], block: [threads, 1, 1], shared_bytes, params: &params, copies };
    launch.run_within(&module, memory, 100_000).map(|_| ())
}

/// Declarations and loads of three operands in all widths, and the store of the result `%x`.
const BEFORE: &str = "
    .reg .b64 %in, %out, %i, %xa, %xb, %xc, %x;
    .reg .b32 %t, %a, %b, %c, %d, %e;
    .reg .b16 %ha, %hb, %hc, %h;
    .reg .f32 %fa, %fb, %fc, %f;
    .reg .f64 %da, %db, %dc, %df;
    .reg .pred %p, %q, %pa;
    ld.param.u64 %in, [in];
    ld.param.u64 %out, [out];
    mov.u32 %t, %tid.x;
    mad.wide.u32 %in, %t, 24, %in;
    mad.wide.u32 %out, %t, 8, %out;
    ld.global.u64 %xa, [%in];
    ld.global.u64 %xb, [%in+8];
    ld.global.u64 %xc, [%in+16];
    cvt.u32.u64 %a, %xa; cvt.u32.u64 %b, %xb; cvt.u32.u64 %c, %xc;
    cvt.u16.u64 %ha, %xa; cvt.u16.u64 %hb, %xb; cvt.u16.u64 %hc, %xc;
    mov.b32 %fa, %a; mov.b32 %fb, %b; mov.b32 %fc, %c;
    mov.b64 %da, %xa; mov.b64 %db, %xb; mov.b64 %dc, %xc;
    setp.ne.u32 %pa, %a, 0;
";

/// Runs `body` for each triple of operands: `%xa`, `%a`, `%ha`, `%fa`, `%da` are the first one as 64, 32 and 16 bits,
/// f32 and f64, and so on. The result is the register `result`: x, d, h, f, df or p.
pub fn evaluate(body: &str, result: &str, operands: &[[u64; 3]]) -> Vec<u64> {
    let finish = match result {
        "x" => "",
        "d" => "cvt.u64.u32 %x, %d;",
        "h" => "cvt.u64.u16 %x, %h;",
        "f" => "mov.b32 %d, %f; cvt.u64.u32 %x, %d;",
        "df" => "mov.b64 %x, %df;",
        "p" => "selp.u64 %x, 1, 0, %p;",
        other => panic!("{other} is no result"),
    };
    let text =
        module(".param .u64 in, .param .u64 out", &format!("{BEFORE}\n{body}\n{finish}\nst.global.u64 [%out], %x;"));
    let mut results = Vec::new();
    for chunk in operands.chunks(1024) {
        let mut memory = Memory::new();
        let bytes: Vec<u8> = chunk.iter().flatten().flat_map(|v| v.to_le_bytes()).collect();
        let (input, output) = (memory.upload(&bytes), memory.alloc(chunk.len() * 8));
        launch(&text, &mut memory, chunk.len() as u32, 0, &[input, output], CopyLanding::AtWait)
            .unwrap_or_else(|fault| panic!("{body}: {fault}"));
        let bytes = memory.read(output, chunk.len() * 8).unwrap();
        results.extend(bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())));
    }
    results
}

/// Checks `body` against plain Rust for all triples of `values`.
pub fn check(body: &str, result: &str, values: &[u64], expected: impl Fn(u64, u64, u64) -> u64) {
    let mut operands = Vec::new();
    let third = if body.contains("%c") || body.contains("c;") { values } else { &values[..1] };
    let third = if body.contains("%xc") || body.contains("%hc") { values } else { third };
    for a in values {
        for b in values {
            operands.extend(third.iter().map(|c| [*a, *b, *c]));
        }
    }
    for ([a, b, c], found) in operands.iter().zip(evaluate(body, result, &operands)) {
        let expected = expected(*a, *b, *c);
        assert_eq!(found, expected, "{body} of {a:#x}, {b:#x}, {c:#x}: {found:#x}, but {expected:#x} is right");
    }
}

/// Runs `threads` threads of a body with `out` (256 words, zeros) as `%out`; shared memory `s` of 4096 bytes.
pub fn run_shared(body: &str, threads: u32, copies: CopyLanding) -> Result<Vec<u32>, Fault> {
    let text = module(
        ".param .u64 out, .param .u64 data",
        &format!(
            ".reg .b64 %out, %data, %x, %y; .reg .b32 %t, %w, %l, %a, %b, %c, %d, %e; .reg .pred %p, %q;
            .reg .b16 %h; .shared .align 16 .b8 s[4096];
            ld.param.u64 %out, [out]; ld.param.u64 %data, [data]; mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31;
            {body}"
        ),
    );
    let mut memory = Memory::new();
    let out = memory.upload(&[0; 1024]);
    let data: Vec<u8> = (0..1024u32).flat_map(|i| (i * 3 + 1).to_le_bytes()).collect();
    let data = memory.upload(&data);
    launch(&text, &mut memory, threads, 0, &[out, data], copies)?;
    let bytes = memory.read(out, 1024).unwrap();
    Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect())
}

/// The fault of a body for [`run_shared`].
pub fn fault_of(body: &str, threads: u32) -> String {
    let faults: Vec<String> = [CopyLanding::AtWait, CopyLanding::AtIssue]
        .into_iter()
        .map(|c| run_shared(body, threads, c).expect_err("there has to be a fault").to_string())
        .collect();
    faults.join("\n")
}
