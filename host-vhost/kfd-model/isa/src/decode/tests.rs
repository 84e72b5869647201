use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the words are: an answer, no panic, no more words than there are, and none that make no difference.
    #[test]
    fn any_words_are_an_instruction_or_an_error(words in proptest::collection::vec(any::<u32>(), 0..3)) {
        for target in [Target::Gfx900, Target::Gfx906] {
            if let Ok(inst) = decode(target, &words) {
                prop_assert!((1..=2).contains(&inst.words));
                prop_assert!(usize::from(inst.words) <= words.len());
                prop_assert_eq!(decode(target, &words[..usize::from(inst.words)]), Ok(inst));
            }
        }
    }
}

#[test]
fn errors_name_the_bits() {
    let error = |words: &[u32]| decode(Target::Gfx906, words).unwrap_err().to_string();
    assert_eq!(error(&[]), "an instruction of 1 words, 0 are there");
    // s_mov_b32 s0, a literal.
    assert_eq!(error(&[0xbe80_00ff]), "an instruction of 2 words, 1 are there");
    assert_eq!(error(&[0xffff_ffff, 0]), "0xffffffff: no encoding has bits 31:26 = 0x3f");
    assert_eq!(error(&[0xf000_0000, 0]), "0xf0000000: MIMG instructions are not implemented");
    assert_eq!(error(&[0xbe80_ff00]), "0xbe80ff00: Sop1 has no opcode 0xff on this target");
    // s_barrier with an immediate.
    assert_eq!(error(&[0xbf8a_0001]), "0xbf8a0001: bits 0x1 of word 0 must be 0 in s_barrier");
    // s_mov_b64 from s1: pairs are aligned.
    assert_eq!(error(&[0xbe80_0101]), "0xbe800101: SSRC0 = 0x1 means nothing in s_mov_b64");
}

#[test]
fn what_only_one_target_has() {
    // v_fmac_f32 v0, v1, v2; v_fma_mix_f32 and v_mad_mix_f32 have one number.
    let fmac = [0x7600_0501];
    assert!(matches!(decode(Target::Gfx900, &fmac), Err(DecodeError::Opcode { code: 0x3b, .. })));
    assert_eq!(decode(Target::Gfx906, &fmac).unwrap().op, Op::VFmacF32);
    let mix = [0xd3a0_0000, 0x0402_0501];
    assert_eq!(decode(Target::Gfx900, &mix).unwrap().op, Op::VMadMixF32);
    assert_eq!(decode(Target::Gfx906, &mix).unwrap().op, Op::VFmaMixF32);
}
