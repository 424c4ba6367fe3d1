//! What the parser takes, and how it names what it does not.

mod common;
use common::{launch, module};
use ptx_emulator::{CopyLanding, Memory, Module};

fn error(body: &str) -> String {
    let text = module("", &format!(".reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p;\n{body}"));
    Module::parse(&text).expect_err("this is no PTX").to_string()
}

#[test]
fn unknown_instructions_are_named_with_their_line() {
    assert_eq!(
        error("wgmma.fence.sync.aligned;"),
        "line 7: unknown opcode wgmma.fence.sync.aligned: `wgmma.fence.sync.aligned;`"
    );
    // A modifier that would change the result is not passed over.
    assert!(error("add.cc.u32 %r0, %r1, %r2;").contains("line 7: unknown opcode add.cc.u32"));
    assert!(error("prmt.b32.f4e %r0, %r1, %r2, %r3;").contains("unknown opcode prmt.b32.f4e"));
    assert!(error("add.rm.f32 %r0, %r1, %r2;").contains("unknown opcode add.rm.f32"));
    assert!(error("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, {%r0,%r1}, {%r0,%r1,%r2,%r3};").contains("line 7"));
    assert!(error("call foo, ();").contains("line 7"));
}

#[test]
fn wrong_operands_are_named() {
    assert!(error("add.u32 %r0, %r1, %r9;").contains("%r9 is no register"));
    assert!(error("add.u32 %r0, %r1, %rd1;").contains("%rd1 is a register of Wide class; Narrow is needed"));
    assert!(error("add.u32 %r0, %r1;").contains("2 operands; 3 to 3 are allowed"));
    assert!(error("bra NOWHERE;").contains("NOWHERE is no label"));
    assert!(error("ld.global.v2.u32 {%r0}, [%rd0];").contains("a vector of 2 registers is needed"));
    assert!(error("cp.async.cg.shared.global [%r0], [%rd0], 8;").contains("cp.async copies 16 bytes"));
    assert!(error("@%q bra X; X:").contains("%q is no register"));
    assert!(error("add.u32 %r0, %r1, %r2").contains("line"));
    assert!(Module::parse(".func foo() { ret; }").unwrap_err().to_string().contains("device functions"));
    assert!(
        Module::parse(".version 8.4\n.wrong x;").unwrap_err().to_string().starts_with("line 2: .wrong is not known")
    );
    assert!(Module::parse(".entry k() { /* no end").unwrap_err().to_string().contains("a comment without end"));
    assert!(Module::parse(".entry k() { ret;").unwrap_err().to_string().contains("the text ends too early"));
}

#[test]
fn scopes_debug_lines_and_pragmas() {
    let text = "//\n.version 8.4\n.target sm_80, debug\n.address_size 64\n.file 1 \"a.cu\"
        .extern .shared .align 16 .b8 dynamic[];
        .visible .entry k(.param .u64 .ptr .global .align 8 out)\n.maxntid 32, 1, 1\n{
        .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<2>;
        .loc 1 12 3
        .pragma \"nounroll\";
        ld.param.u64 %rd1, [out]; mov.u32 %r1, 0;
        { // an inline assembly with names of its own
            .reg .pred %q;
            .reg .b32 %r1;
            mov.u32 %r1, 5;
            AGAIN:
            sub.u32 %r1, %r1, 1;
            setp.ne.u32 %q, %r1, 0;
            @%q bra AGAIN;
        }
        {
            .reg .pred q; .reg .b32 count;
            mov.u32 count, 3;
            AGAIN: add.u32 %r1, %r1, 10; sub.u32 count, count, 1; setp.ne.u32 q, count, 0; @q bra AGAIN;
        }
        mov.u32 %r2, dynamic; st.shared.u32 [%r2+4], %r1; ld.shared.u32 %r1, [dynamic+4];
        st.global.u32 [%rd1], %r1;
        ret;\n}\n.section .debug_str { .b8 1, 2 }\n";
    let mut memory = Memory::new();
    let out = memory.alloc(4);
    launch(text, &mut memory, 1, 8, &[out], CopyLanding::AtWait).unwrap();
    assert_eq!(memory.read(out, 4).unwrap(), 30u32.to_le_bytes());
    let fault = launch(text, &mut memory, 1, 4, &[out], CopyLanding::AtWait).unwrap_err().to_string();
    assert!(fault.contains("line 28") && fault.contains("st.shared.u32 [%r2+4]"), "{fault}");
}
