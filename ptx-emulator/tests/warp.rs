//! Divergence, shuffles, votes, special registers and local memory.

mod common;
use common::{fault_of, run_shared};
use ptx_emulator::CopyLanding;

/// Runs 32 threads; each stores `%d`.
fn lanes(body: &str) -> Vec<u32> {
    threads(body, 32)
}

fn threads(body: &str, count: u32) -> Vec<u32> {
    let store = "mad.wide.u32 %out, %t, 4, %out; st.global.u32 [%out], %d;";
    let out = run_shared(&format!("{body}\n{store}"), count, CopyLanding::AtWait).unwrap_or_else(|f| panic!("{f}"));
    out[..count as usize].to_vec()
}

fn each(f: impl Fn(u32) -> u32) -> Vec<u32> {
    (0..32).map(f).collect()
}

#[test]
fn lanes_that_diverge_meet_again() {
    // Nested branches; afterwards the whole warp votes, which needs all lanes.
    let body = "
        setp.lt.u32 %p, %l, 8;
        @%p bra LOW;
        setp.lt.u32 %p, %l, 16;
        @!%p bra HIGH;
        mov.u32 %d, 2;
        bra.uni MET;
    HIGH:
        mov.u32 %d, 3;
    MET:
        add.u32 %d, %d, 10;
        bra DONE;
    LOW:
        mov.u32 %d, 1;
    DONE:
        setp.ne.u32 %p, %d, 0;
        vote.sync.ballot.b32 %e, %p, 0xffffffff;
        popc.b32 %e, %e;
        mad.lo.u32 %d, %e, 100, %d;";
    assert_eq!(lanes(body), each(|l| 3200 + [1, 12, 13, 13][l as usize / 8]));
}

#[test]
fn loops_of_different_lengths_meet_at_their_end() {
    let body = "
        mov.u32 %d, 0; mov.u32 %a, 0;
    LOOP:
        setp.gt.u32 %p, %a, %l;
        @%p bra END;
        add.u32 %d, %d, %a;
        add.u32 %a, %a, 1;
        bra LOOP;
    END:
        shfl.sync.idx.b32 %e, %d, 31, 31, 0xffffffff;
        add.u32 %d, %d, %e;";
    assert_eq!(lanes(body), each(|l| l * (l + 1) / 2 + 496));
}

#[test]
fn a_loop_may_stand_before_the_code_that_enters_it() {
    // The exit lies above the loop, so that the lowest program counter does not tell who waits for whom.
    let body = "
        mov.u32 %d, 0;
        bra BEGIN;
    END:
        activemask.b32 %e;
        popc.b32 %e, %e;
        mad.lo.u32 %d, %e, 100, %d;
        bra STORE;
    BEGIN:
        add.u32 %d, %d, 1;
        setp.gt.u32 %p, %d, %l;
        @%p bra END;
        bra BEGIN;
    STORE:";
    assert_eq!(lanes(body), each(|l| 3200 + l + 1));
}

#[test]
fn exited_lanes_take_no_part() {
    let body = "
        setp.ge.u32 %p, %l, 4;
        @%p ret;
        activemask.b32 %d;";
    assert_eq!(lanes(body), each(|l| if l < 4 { 15 } else { 0 }));
}

#[test]
fn shuffles() {
    let shuffle = |what: &str| {
        lanes(&format!("mov.u32 %a, %l; shfl.sync.{what}, 0xffffffff; selp.u32 %e, 100, 0, %p; add.u32 %d, %d, %e;"))
    };
    let inside = |from: u32, ok: bool, own: u32| if ok { from + 100 } else { own };
    assert_eq!(shuffle("bfly.b32 %d|%p, %a, 5, 31"), each(|l| (l ^ 5) + 100));
    assert_eq!(shuffle("idx.b32 %d|%p, %a, 7, 31"), each(|_| 107));
    assert_eq!(shuffle("up.b32 %d|%p, %a, 3, 0"), each(|l| inside(l.wrapping_sub(3), l >= 3, l)));
    assert_eq!(shuffle("down.b32 %d|%p, %a, 3, 31"), each(|l| inside(l + 3, l + 3 < 32, l)));
    // Segments of 8 lanes: the mask is 24.
    assert_eq!(shuffle("idx.b32 %d|%p, %a, 2, 0x181f"), each(|l| l / 8 * 8 + 102));
    assert_eq!(shuffle("up.b32 %d|%p, %a, 1, 0x1800"), each(|l| inside(l.wrapping_sub(1), l % 8 >= 1, l)));
    assert_eq!(shuffle("down.b32 %d|%p, %a, 1, 0x181f"), each(|l| inside(l + 1, l % 8 < 7, l)));
    assert_eq!(shuffle("bfly.b32 %d|%p, %a, 4, 0x181f"), each(|l| (l ^ 4) + 100));
}

#[test]
fn votes_and_reductions() {
    let vote =
        |what: &str| lanes(&format!("setp.lt.u32 %q, %l, 5; vote.sync.{what}, 0xffffffff; selp.u32 %d, 1, 0, %p;"));
    assert_eq!(vote("any.pred %p, %q"), each(|_| 1));
    assert_eq!(vote("all.pred %p, %q"), each(|_| 0));
    assert_eq!(vote("uni.pred %p, %q"), each(|_| 0));
    assert_eq!(lanes("setp.lt.u32 %q, %l, 5; vote.sync.ballot.b32 %d, !%q, 0xffffffff;"), each(|_| !31));
    assert_eq!(lanes("redux.sync.add.s32 %d, %l, 0xffffffff;"), each(|_| 496));
    assert_eq!(lanes("sub.u32 %a, %l, 5; redux.sync.min.s32 %d, %a, 0xffffffff;"), each(|_| -5i32 as u32));
    assert_eq!(lanes("sub.u32 %a, %l, 5; redux.sync.max.u32 %d, %a, 0xffffffff;"), each(|_| u32::MAX));
    assert_eq!(lanes("shr.u32 %a, %l, 3; match.any.sync.b32 %d, %a, 0xffffffff;"), each(|l| 255 << (l / 8 * 8)));
    // Half of a warp among itself.
    let half = "setp.lt.u32 %p, %l, 16; mov.u32 %d, 0; @%p redux.sync.add.u32 %d, %l, 0xffff;";
    assert_eq!(lanes(half), each(|l| if l < 16 { 120 } else { 0 }));
}

#[test]
fn incomplete_warps_are_faults() {
    let shuffle = fault_of("setp.lt.u32 %p, %l, 16; @%p shfl.sync.bfly.b32 %d, %l, 1, 31, 0xffffffff;", 32);
    assert!(shuffle.contains("the member mask names lanes 0xffffffff, but lanes 0x0000ffff run this"), "{shuffle}");
    let from = fault_of("setp.lt.u32 %p, %l, 16; @%p shfl.sync.idx.b32 %d, %l, 20, 31, 0xffff;", 32);
    assert!(from.contains("reads from lane 20, which does not take part"), "{from}");
    let matrix =
        fault_of("mov.u32 %a, s; setp.lt.u32 %p, %l, 31; @%p ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d}, [%a];", 32);
    assert!(matrix.contains("all 32 lanes of the warp have to run this together; only 0x7fffffff do"), "{matrix}");
    let sync = fault_of("setp.lt.u32 %p, %l, 31; @%p bar.warp.sync 0xffffffff;", 32);
    assert!(sync.contains("member mask"), "{sync}");
}

#[test]
fn special_registers() {
    assert_eq!(threads("mov.u32 %d, %tid.x;", 40), (0..40).collect::<Vec<_>>());
    assert_eq!(lanes("mov.u32 %a, %laneid; mov.u32 %b, %ntid.x; mad.lo.u32 %d, %a, 100, %b;"), each(|l| l * 100 + 32));
    assert_eq!(threads("mov.u32 %d, %warpid;", 64), (0..64).map(|t| t / 32).collect::<Vec<_>>());
    assert_eq!(lanes("mov.u32 %d, %lanemask_lt;"), each(|l| (1 << l) - 1));
    assert_eq!(lanes("mov.u32 %d, %lanemask_ge;"), each(|l| u32::MAX << l));
    assert_eq!(lanes("mov.u32 %a, %clock; mov.u32 %b, %clock; sub.u32 %d, %b, %a;"), each(|_| 1));
    assert_eq!(lanes("mov.u32 %d, %nctaid.y; add.u32 %d, %d, %ctaid.x;"), each(|_| 1));
}

#[test]
fn local_memory_belongs_to_a_lane() {
    let body = "
        .local .align 8 .b8 depot[16]; .reg .b64 %SP, %SPL;
        mov.u64 %SPL, depot;
        cvta.local.u64 %SP, %SPL;
        st.local.v2.u32 [%SPL+8], {%l, %t};
        ld.u32 %d, [%SP+8];
        isspacep.local %p, %SP;
        @!%p trap;";
    assert_eq!(lanes(body), each(|l| l));
    let fault = fault_of(".local .align 8 .b8 depot[16]; mov.u64 %x, depot; st.local.u32 [%x+16], %l;", 32);
    assert!(fault.contains("local write of 4 bytes at 0x10 is out of bounds: 16 bytes exist"), "{fault}");
}

#[test]
fn endless_loops_and_traps_are_faults() {
    let fault = fault_of("AGAIN: bra AGAIN;", 32);
    assert!(fault.contains("the warp ran 100000 instructions without an end"), "{fault}");
    let fault = fault_of("setp.eq.u32 %p, %l, 3; @%p trap;", 32);
    assert!(fault.contains("`@%p trap;`") || fault.contains("trapped"), "{fault}");
}
