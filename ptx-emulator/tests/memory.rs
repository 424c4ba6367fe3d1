//! Global memory, parameters, module variables and launches.

mod common;
use common::{launch, module};
use ptx_emulator::{CopyLanding, Fault, Launch, Memory, Module};

const HEAD: &str = ".reg .b64 %a, %b, %x; .reg .b32 %t, %d, %e, %f, %g; .reg .b16 %h; .reg .pred %p;
    ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; mov.u32 %t, %tid.x;";

/// Runs a body over 64 bytes at `%a`, which hold 0, 1, 2, …, and 64 that nobody wrote at `%b`; returns the latter.
fn run(body: &str) -> Result<Vec<u8>, Fault> {
    let mut memory = Memory::new();
    let a = memory.upload(&(0..64).collect::<Vec<u8>>());
    let b = memory.alloc(64);
    let text = module(".param .u64 a, .param .u64 b", &format!("{HEAD}\n{body}"));
    launch(&text, &mut memory, 1, 0, &[a, b], CopyLanding::AtWait)?;
    Ok(memory.read_or(b, 64, 0xee).unwrap())
}

fn fault(body: &str) -> String {
    run(body).expect_err("there has to be a fault").to_string()
}

#[test]
fn loads_and_stores_of_all_widths() {
    let stored = |body: &str, len: usize| run(body).unwrap()[..len].to_vec();
    assert_eq!(stored("ld.global.u8 %d, [%a+3]; st.global.u8 [%b+1], %d;", 3), [0xee, 3, 0xee]);
    assert_eq!(stored("ld.global.nc.u16 %h, [%a+2]; st.global.u16 [%b], %h;", 3), [2, 3, 0xee]);
    assert_eq!(
        stored("ld.global.L1::no_allocate.L2::128B.u64 %x, [%a+8]; st.global.cs.u64 [%b], %x;", 9),
        [8, 9, 10, 11, 12, 13, 14, 15, 0xee]
    );
    let vector = "ld.global.v4.u32 {%d, %e, %f, %g}, [%a+16]; st.global.v4.b32 [%b], {%g, %f, %e, %d};";
    assert_eq!(stored(vector, 16), [28, 29, 30, 31, 24, 25, 26, 27, 20, 21, 22, 23, 16, 17, 18, 19]);
    let bytes = "ld.global.v2.u8 {%d, %e}, [%a+4]; st.global.v4.u8 [%b], {%e, %d, %e, %d};";
    assert_eq!(stored(bytes, 5), [5, 4, 5, 4, 0xee]);
    // A wider register gets the sign.
    let signed = "mov.u32 %d, 0x80; st.global.u8 [%b+8], %d; ld.global.s8 %x, [%b+8]; st.global.u64 [%b], %x;";
    assert_eq!(stored(signed, 9), [0x80, 255, 255, 255, 255, 255, 255, 255, 0x80]);
}

#[test]
fn accesses_outside_of_allocations() {
    let message = fault("ld.global.u32 %d, [%a+64];");
    assert!(message.contains("kernel k, CTA (0, 0, 0), warp 0, lane 0: line 8"), "{message}");
    assert!(message.contains("byte 64 of the allocation of 64 bytes"), "{message}");
    assert!(fault("ld.global.v2.u32 {%d, %e}, [%a+64];").contains("out of bounds"));
    assert!(fault("st.global.u8 [%a+-1], %t;").contains("no allocation lies before it"));
    assert!(fault("mov.u64 %x, 0; ld.global.u32 %d, [%x];").contains("out of bounds"));
    // The gap between two allocations belongs to nobody.
    assert!(fault("st.global.u32 [%b+-256], %t;").contains("out of bounds"));
    assert!(fault("ld.global.u32 %d, [%a+2];").contains("is not aligned to its size"));
    assert!(fault("ld.global.v4.u32 {%d, %e, %f, %g}, [%a+8];").contains("is not aligned"));
    // Generic addresses are the same for global memory.
    assert!(fault("ld.u32 %d, [%a+64];").contains("global read of 4 bytes"));
}

#[test]
fn reads_of_what_nobody_wrote() {
    assert!(fault("ld.global.u32 %d, [%b+4];").contains("byte 4 of the allocation"));
    let half = fault("st.global.u8 [%b], %t; st.global.u8 [%b+2], %t; ld.global.u32 %d, [%b];");
    assert!(half.contains("byte 1 of the allocation") && half.contains("was never written"), "{half}");
    assert!(run("st.global.u32 [%b], %t; ld.global.u16 %h, [%b+2];").is_ok());
    assert!(fault("red.global.add.u32 [%b], 1;").contains("was never written"));
}

#[test]
fn the_host_sees_the_same_rules() {
    let mut memory = Memory::new();
    let (a, b) = (memory.upload(&[1, 2, 3]), memory.alloc(8));
    assert_eq!([a % 256, b % 256], [0, 0]);
    assert_eq!(memory.read(a + 1, 2).unwrap(), [2, 3]);
    assert!(memory.read(a, 4).unwrap_err().to_string().contains("out of bounds"));
    assert!(memory.read(b, 8).unwrap_err().to_string().contains("byte 0 of the 8"));
    memory.write(b + 2, &[9]).unwrap();
    assert_eq!(memory.read_or(b, 4, 7).unwrap(), [7, 7, 9, 7]);
    memory.free(a).unwrap();
    assert!(memory.read(a, 1).is_err());
    assert!(memory.free(a).unwrap_err().to_string().contains("no live allocation"));
    assert_eq!(memory.read(b + 2, 1).unwrap(), [9]);
}

#[test]
fn parameters_are_laid_out_by_alignment() {
    let text = module(
        ".param .u32 first, .param .u64 out, .param .align 8 .b8 tile[12], .param .f32 last",
        ".reg .b64 %o, %p1; .reg .b32 %a, %b, %c, %d, %e;
        ld.param.u32 %a, [first]; ld.param.u64 %o, [out]; ld.param.v2.u32 {%b, %c}, [tile]; ld.param.u32 %d, [tile+8];
        ld.param.u32 %e, [last]; st.global.v4.u32 [%o], {%a, %b, %c, %d}; st.global.u32 [%o+16], %e;
        mov.b64 %p1, tile; cvta.param.u64 %p1, %p1; ld.u32 %a, [%p1+4]; st.global.u32 [%o+20], %a;",
    );
    let module = Module::parse(&text).unwrap();
    let mut memory = Memory::new();
    let out = memory.alloc(24);
    let mut params: Vec<u8> = [11u32, 0].iter().flat_map(|v| v.to_le_bytes()).collect();
    params.extend(out.to_le_bytes());
    params.extend([22u32, 33, 44, 55].iter().flat_map(|v| v.to_le_bytes()));
    let mut launch = Launch {
        kernel: "k",
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        params: &params,
        copies: CopyLanding::AtWait,
    };
    launch.run(&module, &mut memory).unwrap();
    let words: Vec<u8> = [11u32, 22, 33, 44, 55, 33].iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(memory.read(out, 24).unwrap(), words);
    launch.params = &params[..24];
    let message = launch.run(&module, &mut memory).unwrap_err().to_string();
    assert_eq!(message, "launch of kernel k: 24 bytes of parameters; the kernel has 32, each aligned to its size");
}

#[test]
fn module_variables_have_their_initial_values() {
    let text = ".version 8.4\n.target sm_80\n.address_size 64
        .const .align 4 .f32 scale[2] = {0f3F000000, 0f40000000};
        .global .align 8 .b8 table[8] = {1, 2, 3, 4};
        .visible .entry k(.param .u64 out) {
        .reg .b64 %o, %x, %y; .reg .b32 %d, %e; .reg .f32 %f;
        ld.param.u64 %o, [out]; ld.const.f32 %f, [scale+4]; st.global.f32 [%o], %f;
        mov.u64 %x, table; cvta.global.u64 %y, %x; ld.u32 %d, [%y]; st.global.u32 [%o+4], %d;
        ld.global.u32 %e, [table+4]; st.global.u32 [table], 7; st.global.u32 [%o+8], %e; ret; }";
    let mut memory = Memory::new();
    let out = memory.alloc(12);
    // The second run starts with the same values as the first.
    for _ in 0..2 {
        launch(text, &mut memory, 1, 0, &[out], CopyLanding::AtWait).unwrap();
        let words: Vec<u8> = [0x4000_0000u32, 0x0403_0201, 0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(memory.read(out, 12).unwrap(), words);
    }
}

#[test]
fn a_grid_of_blocks() {
    let text = module(
        ".param .u64 out",
        ".reg .b64 %o; .reg .b32 %x, %y, %z, %nx, %ny, %i, %tx, %ty;
        ld.param.u64 %o, [out]; mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z;
        mov.u32 %nx, %nctaid.x; mov.u32 %ny, %nctaid.y; mad.lo.u32 %i, %z, %ny, %y; mad.lo.u32 %i, %i, %nx, %x;
        mov.u32 %tx, %tid.x; mov.u32 %ty, %tid.y; mad.lo.u32 %i, %i, 3, %ty; mad.lo.u32 %i, %i, 5, %tx;
        mad.wide.u32 %o, %i, 4, %o; st.global.u32 [%o], %i;",
    );
    let module = Module::parse(&text).unwrap();
    let mut memory = Memory::new();
    let out = memory.alloc(4 * 24 * 15);
    let params = out.to_le_bytes();
    let launch = Launch {
        kernel: "k",
        grid: [2, 3, 4],
        block: [5, 3, 1],
        shared_bytes: 0,
        params: &params,
        copies: CopyLanding::AtWait,
    };
    let counts = launch.run(&module, &mut memory).unwrap();
    assert_eq!(counts.global_written, 24 * 15 * 4);
    let words: Vec<u8> = (0..24 * 15u32).flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(memory.read(out, words.len()).unwrap(), words);
}

#[test]
fn memory_at_chosen_addresses() {
    const AT: u64 = (1 << 40) + (5 << 32);
    let mut memory = Memory::new();
    let near = memory.upload(&[9; 16]);
    memory.upload_at(AT, &[7; 16]).unwrap();
    // In any order, and next to each other without a gap.
    memory.upload_at(AT - 16, &[6; 16]).unwrap();
    let later = memory.alloc(4);
    let body = ".reg .b64 %a, %b; .reg .b32 %d; ld.param.u64 %a, [a]; ld.param.u64 %b, [b];
        ld.global.u32 %d, [%a]; st.global.u32 [%b], %d; st.global.u32 [%a+-16], %d;";
    let text = module(".param .u64 a, .param .u64 b", body);
    launch(&text, &mut memory, 1, 0, &[AT, later], CopyLanding::AtWait).unwrap();
    assert_eq!(memory.read(later, 4).unwrap(), [7; 4]);
    assert_eq!(memory.read(AT - 16, 8).unwrap(), [7, 7, 7, 7, 6, 6, 6, 6]);
    assert_eq!(memory.read(near, 16).unwrap(), [9; 16]);
    // 2^32 bytes before it there is nothing.
    let message = launch(&text, &mut memory, 1, 0, &[AT - (1 << 32), later], CopyLanding::AtWait).unwrap_err();
    assert!(message.to_string().contains("out of bounds"), "{message}");

    let refused = |memory: &mut Memory, address: u64, len: usize| {
        memory.upload_at(address, &vec![0; len]).unwrap_err().to_string()
    };
    assert!(refused(&mut memory, AT + 8, 4).contains("multiples of 16"));
    assert!(refused(&mut memory, near, 16).contains("0x10100000000..0x20000000000 can be chosen"));
    assert!(refused(&mut memory, (2 << 40) - 16, 17).contains("can be chosen"));
    for (address, len) in [(AT, 16), (AT, 0), (AT - 32, 17), (AT - 32, 64)] {
        assert!(refused(&mut memory, address, len).contains("are allocated"), "{address:x} {len}");
    }
    memory.free(AT).unwrap();
    memory.upload_at(AT, &[1; 32]).unwrap();
}

#[test]
fn the_first_block_with_a_fault_is_reported() {
    // Blocks 5 and up leave the array, on whichever core they run.
    let text = module(
        ".param .u64 out",
        ".reg .b64 %o; .reg .b32 %x; ld.param.u64 %o, [out]; mov.u32 %x, %ctaid.x; mad.wide.u32 %o, %x, 4, %o;
        st.global.u32 [%o], %x;",
    );
    let module = Module::parse(&text).unwrap();
    for _ in 0..20 {
        let mut memory = Memory::new();
        let params = memory.alloc(20).to_le_bytes();
        let launch = Launch {
            kernel: "k",
            grid: [64, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            params: &params,
            copies: CopyLanding::AtWait,
        };
        let message = launch.run(&module, &mut memory).unwrap_err().to_string();
        assert!(message.contains("CTA (5, 0, 0), warp 0, lane 0"), "{message}");
    }
}

#[test]
fn launches_are_checked() {
    let text = module("", "").replace("()\n{", "()\n.maxntid 64, 1, 1\n.minnctapersm 2\n{");
    let module = Module::parse(&text).unwrap();
    let run = |kernel: &str, grid: [u32; 3], block: [u32; 3]| {
        let launch = Launch { kernel, grid, block, shared_bytes: 0, params: &[], copies: CopyLanding::AtWait };
        launch.run(&module, &mut Memory::new()).map_err(|fault| fault.to_string())
    };
    assert!(run("k", [1; 3], [64, 1, 1]).is_ok());
    assert!(run("k", [1; 3], [65, 1, 1]).unwrap_err().contains(".maxntid allows [64, 1, 1]"));
    assert!(run("other", [1; 3], [1; 3]).unwrap_err().contains("no such kernel; it has k"));
    assert!(run("k", [1, 0, 1], [1; 3]).unwrap_err().contains("a grid of [1, 0, 1] blocks"));
    assert!(run("k", [1; 3], [2, 1024, 1]).unwrap_err().contains("1 to 1024 are allowed"));
    let required = Module::parse(&text.replace(".maxntid 64, 1, 1", ".reqntid 8")).unwrap();
    let launch = Launch {
        kernel: "k",
        grid: [1; 3],
        block: [9, 1, 1],
        shared_bytes: 0,
        params: &[],
        copies: CopyLanding::AtWait,
    };
    let message = launch.run(&required, &mut Memory::new()).unwrap_err().to_string();
    assert!(message.contains(".reqntid needs [8, 1, 1]"), "{message}");
}
