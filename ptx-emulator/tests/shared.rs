//! Shared memory, barriers and races between warps.

mod common;
use common::{fault_of, run_shared};
use ptx_emulator::CopyLanding;

fn ok(body: &str, threads: u32) -> Vec<u32> {
    let results = [CopyLanding::AtWait, CopyLanding::AtIssue]
        .map(|copies| run_shared(body, threads, copies).unwrap_or_else(|fault| panic!("{fault}")));
    assert_eq!(results[0], results[1]);
    results.into_iter().next().unwrap()
}

/// Each thread writes its number times 7; then each reads that of the thread `t ^ 32` and stores it.
const EXCHANGE: &str = "
    mov.u32 %a, s; mad.lo.u32 %b, %t, 4, %a; mul.lo.u32 %d, %t, 7; st.shared.u32 [%b], %d;
    BARRIER
    xor.b32 %c, %t, 32; mad.lo.u32 %b, %c, 4, %a; ld.shared.u32 %d, [%b];
    mad.wide.u32 %out, %t, 4, %out; st.global.u32 [%out], %d;";

#[test]
fn a_barrier_orders_warps() {
    for barrier in ["bar.sync 0;", "barrier.sync 3;", "bar.sync 2, 64;", "mov.u32 %e, 5; barrier.cta.sync.aligned %e;"]
    {
        let out = ok(&EXCHANGE.replace("BARRIER", barrier), 64);
        assert_eq!(out[..64], (0..64).map(|t| (t ^ 32) * 7).collect::<Vec<u32>>());
    }
}

#[test]
fn no_barrier_is_a_fault() {
    // The first warp finds nothing; where all is written before, the second one overwrites what it read.
    let unwritten = fault_of(&EXCHANGE.replace("BARRIER", ""), 64);
    assert!(unwritten.contains("warp 0, lane 0") && unwritten.contains("nobody has written yet"), "{unwritten}");
    let body = format!("mov.u32 %a, s; mad.lo.u32 %b, %t, 4, %a; st.shared.u32 [%b], %t; bar.sync 0; {}", EXCHANGE);
    let race = fault_of(&body.replace("BARRIER", ""), 64);
    assert!(race.contains("race on shared byte 0x80: warp 1 overwrites what warp 0 read"), "{race}");
}

#[test]
fn a_write_after_a_read_needs_a_barrier() {
    let body = "
        mov.u32 %a, s; setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [%a], %t; bar.sync 0;
        ld.shared.u32 %d, [%a];
        BARRIER
        setp.eq.u32 %p, %t, 95; @%p st.shared.u32 [%a], %t;";
    ok(&body.replace("BARRIER", "bar.sync 0;"), 96);
    let race = fault_of(&body.replace("BARRIER", ""), 96);
    assert!(race.contains("warp 2 overwrites what warp 0, 1, 2 read"), "{race}");
}

#[test]
fn barriers_order_only_those_who_meet() {
    // Warp 0 writes; warps 0 and 1 meet at barrier 1; warp 2 meets nobody before it reads.
    let body = "
        mov.u32 %a, s; setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [%a], %t;
        setp.lt.u32 %p, %w, 2; @!%p bra OTHER;
        bar.sync 1, 64; ld.shared.u32 %d, [%a]; bra END;
        OTHER: LATE ld.shared.u32 %d, [%a];
        END:";
    let race = fault_of(&body.replace("LATE", ""), 96);
    assert!(race.contains("warp 2 reads what warp 0 wrote"), "{race}");
    // Over warp 1 it may learn of it.
    let body = "
        mov.u32 %a, s; setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [%a], %t;
        setp.eq.u32 %p, %w, 0; @%p bra ZERO; setp.eq.u32 %p, %w, 1; @%p bra ONE;
        bar.sync 2, 64; ld.shared.u32 %d, [%a]; bra END;
        ZERO: bar.sync 1, 64; bra END;
        ONE: bar.sync 1, 64; bar.sync 2, 64;
        END:";
    ok(body, 96);
    // A producer that only arrives does not wait.
    let body = "
        mov.u32 %a, s; setp.eq.u32 %p, %w, 0; @!%p bra READ;
        setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [%a], 5; bar.arrive 1, 64; AFTER bra END;
        READ: bar.sync 1, 64; ld.shared.u32 %d, [%a]; st.global.u32 [%out], %d;
        END:";
    assert_eq!(ok(&body.replace("AFTER", ""), 64)[0], 5);
    let race = fault_of(&body.replace("AFTER", "@%p st.shared.u32 [%a], 6;"), 64);
    assert!(race.contains("race on shared byte 0x0"), "{race}");
}

#[test]
fn barriers_that_not_all_reach() {
    let exited = fault_of("setp.eq.u32 %p, %w, 1; @%p ret; bar.sync 0;", 96);
    assert!(exited.contains("barrier 0 was reached by only 64 threads: warp 1 has exited"), "{exited}");
    let crossed = fault_of("setp.eq.u32 %p, %w, 1; @%p bar.sync 1; @!%p bar.sync 0;", 64);
    assert!(crossed.contains("warp 1 waits at barrier 1"), "{crossed}");
    let diverged = fault_of("setp.lt.u32 %p, %l, 16; @%p bar.sync 0;", 32);
    assert!(diverged.contains("diverged barrier: lanes 0xffff0000 of the warp do not reach it"), "{diverged}");
    let gone = fault_of("setp.lt.u32 %p, %l, 16; @%p ret; bar.sync 0;", 32);
    assert!(gone.contains("lanes 0x0000ffff of the warp have exited"), "{gone}");
    let counts = fault_of("setp.eq.u32 %p, %w, 1; @%p bar.sync 0, 64; @!%p bar.sync 0;", 64);
    assert!(counts.contains("two different counts"), "{counts}");
    let number = fault_of("bar.sync 16;", 32);
    assert!(number.contains("barrier 16 does not exist"), "{number}");
}

#[test]
fn bounds_alignment_and_unwritten_bytes() {
    let far = fault_of("mov.u32 %a, s; st.shared.u32 [%a+4096], %t;", 32);
    assert!(far.contains("shared write of 4 bytes at 0x1000 is out of bounds: the block has 0x1000 bytes"), "{far}");
    let before = fault_of("mov.u32 %a, s; ld.shared.u32 %d, [%a+-4];", 32);
    assert!(before.contains("out of bounds"), "{before}");
    let odd = fault_of("mov.u32 %a, s; st.shared.v2.u32 [%a+4], {%t, %t};", 1);
    assert!(odd.contains("shared write of 8 bytes at 0x4 is not aligned to its size"), "{odd}");
    let half = fault_of("mov.u32 %a, s; mov.u16 %h, 3; st.shared.u16 [%a], %h; ld.shared.u32 %d, [%a];", 1);
    assert!(half.contains("shared read of byte 0x2, which nobody has written yet"), "{half}");
}

#[test]
fn neighbouring_halves_are_no_race() {
    let body = "
        mov.u32 %a, s; mad.lo.u32 %b, %w, 2, %a; cvt.u16.u32 %h, %w; setp.eq.u32 %p, %l, 0;
        @%p st.shared.u16 [%b], %h; bar.sync 0;
        ld.shared.u32 %d, [%a]; st.global.u32 [%out], %d;";
    assert_eq!(ok(body, 64)[0], 0x10000);
}

#[test]
fn vectors_and_generic_addresses() {
    let body = "
        mov.u64 %x, s; cvta.shared.u64 %y, %x; mad.wide.u32 %y, %t, 16, %y;
        add.u32 %a, %t, 1; add.u32 %b, %t, 2; add.u32 %c, %t, 3;
        st.v4.u32 [%y], {%t, %a, %b, %c};
        isspacep.shared %p, %y; @!%p trap;
        cvta.to.shared.u64 %x, %y; ld.shared.v2.u32 {%d, %e}, [%x+8]; add.u32 %d, %d, %e;
        mad.wide.u32 %out, %t, 4, %out; st.global.u32 [%out], %d;";
    assert_eq!(ok(body, 32)[..32], (0..32).map(|t| 2 * t + 5).collect::<Vec<u32>>());
}

#[test]
fn atomics_of_shared_memory() {
    let body = |after: &str| {
        format!(
            "mov.u32 %a, s; setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [%a], 10; bar.sync 0;
            atom.shared.add.u32 %d, [%a], 2; {after} ld.shared.u32 %d, [%a]; @%p st.global.u32 [%out], %d;"
        )
    };
    assert_eq!(ok(&body("bar.sync 0;"), 64)[0], 138);
    let race = fault_of(&body(""), 64);
    assert!(race.contains("race on shared byte"), "{race}");
}

#[test]
fn atomics_of_global_memory() {
    let body = "
        red.global.add.u32 [%out], 1; red.global.max.s32 [%out+4], %t; red.global.add.f32 [%out+8], 0f3F000000;
        atom.global.cas.b32 %d, [%out+12], 0, 77; atom.global.inc.u32 %e, [%out+16], 9;
        red.or.b32 [%out+20], %t; atom.global.exch.b32 %d, [%out+24], %t; red.global.add.u64 [%out+32], 4294967296;";
    let out = ok(body, 64);
    assert_eq!(out[..10], [64, 63, 32f32.to_bits(), 77, 4, 63, 63, 0, 0, 64]);
}
