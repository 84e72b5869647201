//! Why single tests do not pass natively on the model, as was found by looking: with the sources of the tests and of the
//! runtime, and a run of each test by itself.

use crate::gtest::output::Outcome;
use crate::gtest::rows::Row;

/// What is known of one test.
#[derive(Debug, Clone, Copy)]
pub struct Cause {
    /// Group and name, with a point between.
    pub test: &'static str,
    /// How it ends for this cause: the outcome, and the beginning of its note.
    pub ends: &'static str,
    /// It passes on a machine that is idle, or fast enough for the limit.
    pub sometimes: bool,
    /// The cause.
    pub why: &'static str,
}

/// All that is known.
pub const CAUSES: &[Cause] = &[
    Cause {
        test: "rocrtstFunc.Max_Reference_Count",
        ends: "time-out",
        sometimes: true,
        why: "the test calls hsa_init 2147483647 times and hsa_shut_down as often; no GPU has to do with that. It takes 49 s \
              where nothing else has the CPU, 21 minutes beside 20 other programs on two CPUs",
    },
    Cause {
        test: "rocrtstFunc.DISABLED_CU_Masking",
        ends: "fail cu_masking.cc:329",
        sometimes: false,
        why: "disabled upstream; hsa_amd_queue_cu_get_mask of ROCr 7.2.4 answers the mask that the queue was made with, not the \
              one that was set. The one that was set holds: KFD gets it, and the kernel finds as many compute units as it has bits",
    },
    Cause {
        test: "rocrtstFunc.SvmMemory_Basic_Test",
        ends: "skip",
        sometimes: false,
        why: "the model offers no SVM; the test says that it skips",
    },
    Cause {
        test: "rocrtstNeg.DISABLED_Queue_Validation_InvalidWorkGroupSize",
        ends: "fail queue_validation.cc:608",
        sometimes: true,
        why: "disabled upstream; the test destroys each of 192 queues 16.8 ms (0xffffff ticks) after its packet and expects the \
              queue's error by then. On an idle machine it comes within 2 ms, and the test passes; where other programs have \
              the CPUs some errors come late",
    },
    Cause {
        test: "rocrtstStress.Queue_CAS_Write_Index_ConcurrentTest",
        ends: "time-out",
        sometimes: true,
        why: "four threads spin until it is their turn to add one to a number in memory, 4194304 times in all; no GPU has to do \
              with that. Where there are fewer CPUs than four, a turn is a time slice: 30 turns a second were counted on two \
              CPUs with other programs on them, that is more than a day",
    },
    Cause {
        test: "rocrtstPerf.Memory_Async_Copy",
        ends: "time-out",
        sometimes: true,
        why: "for each pair of pools 13 copies there and back of each of 20 sizes up to 512 MiB, 26 GiB in all, which are \
              compared on the CPU. It takes 154 s where nothing else has the two CPUs; 20 minutes were not enough where other \
              programs left it 3 % of one",
    },
    Cause {
        test: "rocrtstPerf.Memory_Async_Copy_On_Engine",
        ends: "time-out",
        sometimes: true,
        why: "as Memory_Async_Copy, for each engine: 117 s where nothing else has the two CPUs",
    },
    Cause {
        test: "rocrtstPerf.ENQUEUE_LATENCY",
        ends: "time-out",
        sometimes: true,
        why: "121 rounds of 100000 kernels that do nothing: 17 s where nothing else has the two CPUs, 4.5 minutes beside 20 other \
              programs",
    },
    Cause {
        test: "rocrtstPerf.DISABLED_Memory_Async_Copy_NUMA",
        ends: "crash SIGABRT",
        sometimes: false,
        why: "disabled upstream; the test has the GPU copy from a host buffer that it gave no GPU access to \
              (hsa_amd_agents_allow_access is called for another one), which is a memory fault",
    },
    Cause {
        test: "rocrtstPerf.AQL_Dispatch_Time_Multi_SpinWait",
        ends: "time-out",
        sometimes: true,
        why: "many kernels that do nothing; it passed in 141 s on two CPUs with 20 other programs that wanted them",
    },
    Cause {
        test: "rocrtstPerf.AQL_Dispatch_Time_Multi_Interrupt",
        ends: "time-out",
        sometimes: true,
        why: "many kernels that do nothing; it passed in 79 s on two CPUs with 20 other programs that wanted them",
    },
];

/// What is known of a test that does not pass natively.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The cause.
    Cause(&'static str),
    /// It ends otherwise than the known cause explains: how it would.
    Otherwise(&'static str),
    /// Nothing.
    Nothing,
}

/// How a test ended, as [`Cause::ends`] has it.
fn end(outcome: &Outcome) -> String {
    format!("{outcome} {}", outcome.note()).trim_end().to_owned()
}

/// What is known of the native end of a test.
pub fn known(row: &Row, causes: &[Cause]) -> Known {
    match causes.iter().find(|cause| cause.test == row.test) {
        Some(cause) if end(&row.native).starts_with(cause.ends) => Known::Cause(cause.why),
        Some(cause) => Known::Otherwise(cause.ends),
        None => Known::Nothing,
    }
}

/// Whether the test does not pass natively, and it is not known why.
pub fn is_unexplained(row: &Row) -> bool {
    !row.native.is_pass() && !matches!(known(row, CAUSES), Known::Cause(_))
}

/// Causes of tests that pass natively, and were to fail everywhere.
pub fn stale<'a>(rows: &[Row], causes: &'a [Cause]) -> Vec<&'a Cause> {
    let passes = |cause: &&Cause| rows.iter().any(|row| row.test == cause.test && row.native.is_pass());
    causes.iter().filter(|cause| !cause.sometimes).filter(passes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gtest::rows::tests::{fail, row};

    const SOME: &[Cause] = &[
        Cause { test: "A.One", ends: "fail one.cc:3", sometimes: false, why: "one" },
        Cause { test: "A.Two", ends: "time-out", sometimes: true, why: "two" },
    ];

    #[test]
    fn a_cause_explains_its_own_end_alone() {
        let known = |test: &str, native| known(&row(test, native, Outcome::Passed), SOME);
        assert_eq!(known("A.One", fail("one.cc:3")), Known::Cause("one"));
        assert_eq!(known("A.One", fail("one.cc:4")), Known::Otherwise("fail one.cc:3"));
        assert_eq!(known("A.Two", Outcome::TimedOut(String::new())), Known::Cause("two"));
        assert_eq!(known("A.Two", Outcome::Crashed("SIGSEGV".to_owned())), Known::Otherwise("time-out"));
        assert_eq!(known("A.Three", fail("one.cc:3")), Known::Nothing);
    }

    #[test]
    fn what_passes_now_shows() {
        let rows =
            [row("A.One", Outcome::Passed, Outcome::Passed), row("A.Two", Outcome::Passed, Outcome::Passed)];
        assert_eq!(stale(&rows, SOME).iter().map(|cause| cause.test).collect::<Vec<_>>(), ["A.One"]);
        assert!(stale(&[row("A.One", fail("x"), Outcome::Passed)], SOME).is_empty());
    }
}
